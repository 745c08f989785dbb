// A CUDA driver without a device: reserves real addresses, maps pages of one file behind them, and runs what streams are
// given later, in any order that streams and events allow. It checks every call, and fails some of them when asked to.
// Physical memory is a sparse file; a "kernel" writes or reads a word of every granule.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>

namespace {

using Address = std::uint64_t;
constexpr int SUCCESS = 0, INVALID = 1, FULL = 2, NO_CONTEXT = 201, NOT_READY = 600, UNKNOWN = 999;

struct Location {
  int type, id;
};
struct Properties {
  int type, handle_types;
  Location location;
  void* win32;
  std::uint64_t flags;
};
struct Access {
  Location location;
  int flags;
};
struct Physical {
  std::size_t size, offset;
  bool on_host, released = false;
  int mapped = 0;
};
struct Mapped {
  std::size_t size;
  std::uint64_t handle;
  bool accessible = false;
};
struct State {  // of an event, as it was recorded once
  void* stream;
  bool passed = false;
};
struct Moment {
  std::shared_ptr<State> last = std::make_shared<State>(State{nullptr, true});
};
enum class Kind { FILL, CHECK, COPY, RECORD, WAIT };
struct Work {
  Kind kind;
  Address address = 0, source = 0;
  std::size_t size = 0;
  std::uint64_t value = 0;
  std::shared_ptr<State> moment = {};
};

std::size_t granule = 1 << 16, capacity[2] = {}, taken[2] = {};
int host_kind = 2;  // of CUmemLocation, that the driver knows; 0 for none
int file = -1;
std::map<std::size_t, std::size_t> holes;  // of the file
std::map<std::uint64_t, Physical> physical;
std::map<Address, std::size_t> reserved;
std::map<Address, Mapped> mapped;
std::map<void*, std::deque<Work>> streams;
std::set<Moment*> events;
std::mt19937_64 dice;
std::map<std::string, double> failing;
std::map<std::string, std::size_t> called;
std::uint64_t next_handle = 1;
thread_local int context = 0;
std::size_t wrongs = 0, forced = 0, injected = 0;
std::string first_wrong;

int wrong(const std::string& what) {
  if (wrongs++ == 0) first_wrong = what;
  return INVALID;
}

// Whether this call is to fail.
bool fails(const char* name) {
  ++called[name];
  const auto found = failing.find(name);
  if (found == failing.end() || std::uniform_real_distribution<>()(dice) >= found->second) return false;
  ++injected;
  return true;
}

// Whether one reservation has all of it.
bool is_reserved(Address address, std::size_t size) {
  const auto after = reserved.upper_bound(address);
  return after != reserved.begin() && address + size <= std::prev(after)->first + std::prev(after)->second;
}

bool overlaps(Address address, std::size_t size) {
  auto after = mapped.lower_bound(address);
  if (after != mapped.end() && after->first < address + size) return true;
  return after != mapped.begin() && std::prev(after)->first + std::prev(after)->second.size > address;
}

bool accessible(Address address, std::size_t size) {
  const Address end = address + size;
  while (address < end) {
    auto at = mapped.upper_bound(address);
    if (at == mapped.begin()) return false;
    --at;
    if (at->first + at->second.size <= address || !at->second.accessible) return false;
    address = at->first + at->second.size;
  }
  return true;
}

std::uint64_t* word(Address address) { return reinterpret_cast<std::uint64_t*>(address); }

void perform(const Work& work) {
  const bool copies = work.kind == Kind::COPY;
  if (work.kind == Kind::RECORD) {
    work.moment->passed = true;
    return;
  }
  if (work.kind == Kind::WAIT) return;
  if (!accessible(work.address, work.size) || (copies && !accessible(work.source, work.size))) {
    wrong("a kernel uses memory that is not there");
    return;
  }
  // A word of every granule of its own, and the last one: small blocks share granules.
  for (std::size_t at = 0; at < work.size; at += granule) {
    if (copies) {
      std::memcpy(word(work.address + at), word(work.source + at), granule < work.size - at ? granule : work.size - at);
    } else if (work.kind == Kind::FILL) {
      *word(work.address + at) = work.value + at;
    } else if (*word(work.address + at) != work.value + at) {
      wrong("a kernel reads what somebody else wrote");
    }
  }
  const std::size_t last = work.size - 8;
  if (copies || work.size % granule < 16) return;
  if (work.kind == Kind::FILL) *word(work.address + last) = work.value;
  if (work.kind == Kind::CHECK && *word(work.address + last) != work.value) wrong("a kernel reads another last word");
}

// One piece of work of a stream; false if it has none, or waits.
bool advance(void* stream) {
  auto& queue = streams[stream];
  if (queue.empty()) return false;
  if (queue.front().kind == Kind::WAIT && !queue.front().moment->passed) return false;
  const Work work = queue.front();
  queue.pop_front();
  perform(work);
  return true;
}

void advance_some() {
  for (auto& [stream, queue] : streams) {
    for (auto pieces = std::uniform_int_distribution<>(0, 3)(dice); pieces > 0 && advance(stream); --pieces) {
    }
  }
}

void run(void* stream, std::shared_ptr<State> until = {}) {
  auto& queue = streams[stream];
  while (until ? !until->passed : !queue.empty()) {
    if (advance(stream)) continue;
    if (queue.empty()) return;
    const auto awaited = queue.front().moment;
    run(awaited->stream, awaited);
  }
}

int enqueue(void* stream, Work work) {
  if (context == 0) return wrong("no context"), NO_CONTEXT;
  streams[stream].push_back(work);
  return SUCCESS;
}

}  // namespace

#define IN_CONTEXT(name)                                                  \
  if (context == 0) return wrong(std::string(name) + " without a context"), NO_CONTEXT; \
  if (fails(name)) return UNKNOWN

extern "C" {

void fake_configure(std::size_t its_granule, std::size_t on_device, std::size_t on_host, int its_host_kind, unsigned seed) {
  granule = its_granule;
  capacity[0] = on_device;
  capacity[1] = on_host;
  host_kind = its_host_kind;
  dice.seed(seed);
  if (file < 0) file = ::memfd_create("device", 0);
  const std::size_t all = 4 * (on_device + on_host);
  if (::ftruncate(file, static_cast<off_t>(all)) != 0) std::perror("ftruncate");
  holes = {{0, all}};
}
void fake_fail(const char* name, double probability) { failing[name] = probability; }
std::size_t fake_called(const char* name) { return called[name]; }
const char* fake_wrong(std::size_t* how_many) {
  *how_many = wrongs;
  return first_wrong.c_str();
}
// Of the device, of the host, reserved, mapped; work that is not done; failures.
void fake_state(std::size_t* out) {
  std::size_t ranges = 0, mappings = 0, work = 0;
  for (const auto& [_, size] : reserved) ranges += size;
  for (const auto& [_, mapping] : mapped) mappings += mapping.size;
  for (const auto& [_, queue] : streams) work += queue.size();
  const std::size_t told[] = {taken[0], taken[1], ranges, mappings, work, injected};
  std::memcpy(out, told, sizeof told);
}
int fake_there(Address address, std::size_t size) { return accessible(address, size) ? 1 : 0; }
int fake_on_host(Address address) {
  const auto at = mapped.find(address);
  return at != mapped.end() && physical.at(at->second.handle).on_host ? 1 : 0;
}
// A kernel that writes a value, or demands it.
void fake_launch(void* stream, int fills, Address address, std::size_t size, std::uint64_t value) {
  streams[stream].push_back(Work{fills != 0 ? Kind::FILL : Kind::CHECK, address, 0, size, value});
}
void fake_advance() { advance_some(); }
void fake_wait(void* stream, void* other) {  // as a program's own event does
  const auto moment = std::make_shared<State>(State{other});
  streams[other].push_back(Work{Kind::RECORD, 0, 0, 0, 0, moment});
  streams[stream].push_back(Work{Kind::WAIT, 0, 0, 0, 0, moment});
}

int cuInit(unsigned) { return fails("cuInit") ? UNKNOWN : SUCCESS; }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return fails("cuDeviceGet") ? UNKNOWN : SUCCESS;
}
int cuDeviceTotalMem_v2(std::size_t* total, int) {
  *total = capacity[0];
  return fails("cuDeviceTotalMem_v2") ? UNKNOWN : SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** out, int) {
  *out = &granule;
  return fails("cuDevicePrimaryCtxRetain") ? UNKNOWN : SUCCESS;
}
int cuCtxPushCurrent_v2(void* pushed) { return pushed == &granule ? (++context, SUCCESS) : wrong("another context"); }
int cuCtxPopCurrent_v2(void**) { return context > 0 ? (--context, SUCCESS) : wrong("no context to pop"); }

int cuMemGetAllocationGranularity(std::size_t* out, const Properties* properties, int) {
  if (fails("cuMemGetAllocationGranularity")) return UNKNOWN;
  if (properties->location.type != 1 && properties->location.type != host_kind) return INVALID;
  *out = granule;
  return SUCCESS;
}
int cuMemAddressReserve(Address* out, std::size_t size, std::size_t alignment, Address near,
                        std::uint64_t flags) {
  IN_CONTEXT("cuMemAddressReserve");
  if (size == 0 || size % granule != 0) return wrong("addresses of an odd size");
  if (alignment != 0 || near != 0 || flags != 0) return wrong("addresses with odd wishes");
  char* wide = static_cast<char*>(
      ::mmap(nullptr, size + 4 * granule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (wide == MAP_FAILED) return FULL;
  const std::size_t before = granule + (granule - reinterpret_cast<Address>(wide) % granule) % granule;
  ::munmap(wide, before);
  ::munmap(wide + before + size, 4 * granule - before);
  void* const at = wide + before;
  *out = reinterpret_cast<Address>(at);
  reserved[*out] = size;
  return SUCCESS;
}
int cuMemAddressFree(Address address, std::size_t size) {
  IN_CONTEXT("cuMemAddressFree");
  const auto range = reserved.find(address);
  if (range == reserved.end() || range->second != size) return wrong("addresses are freed that were not reserved");
  if (overlaps(address, size)) return wrong("addresses are freed that are mapped");
  ::munmap(reinterpret_cast<void*>(address), size);
  reserved.erase(range);
  return SUCCESS;
}
int cuMemCreate(std::uint64_t* out, std::size_t size, const Properties* properties, std::uint64_t flags) {
  IN_CONTEXT("cuMemCreate");
  const bool on_host = properties->location.type != 1;
  if (on_host && properties->location.type != host_kind) return INVALID;
  const bool plain = flags == 0 && properties->type == 1 && properties->handle_types == 0 && properties->location.id == 0;
  if (size == 0 || size % granule != 0 || !plain) return wrong("odd memory");
  if (taken[on_host] + size > capacity[on_host]) return FULL;
  for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
    if (hole->second < size) continue;
    const auto [offset, length] = *hole;
    holes.erase(hole);
    if (length != size) holes.emplace(offset + size, length - size);
    *out = next_handle++;
    physical[*out] = Physical{size, offset, on_host};
    taken[on_host] += size;
    return SUCCESS;
  }
  return FULL;
}

static void gone(std::uint64_t handle) {
  const auto found = physical.find(handle);
  const Physical memory = found->second;
  if (!memory.released || memory.mapped != 0) return;
  taken[memory.on_host] -= memory.size;
  ::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(memory.offset),
              static_cast<off_t>(memory.size));
  holes.emplace(memory.offset, memory.size);
  physical.erase(found);
}

int cuMemRelease(std::uint64_t handle) {
  IN_CONTEXT("cuMemRelease");
  const auto found = physical.find(handle);
  if (found == physical.end() || found->second.released) return wrong("memory is released twice");
  found->second.released = true;
  gone(handle);
  return SUCCESS;
}
int cuMemMap(Address address, std::size_t size, std::size_t offset, std::uint64_t handle, std::uint64_t flags) {
  IN_CONTEXT("cuMemMap");
  const auto found = physical.find(handle);
  if (found == physical.end() || found->second.released) return wrong("memory is mapped that was released");
  if (address % granule != 0 || size != found->second.size || offset != 0 || flags != 0) return wrong("an odd mapping");
  if (!is_reserved(address, size)) return wrong("a mapping outside of what was reserved");
  if (overlaps(address, size)) return wrong("a mapping over a mapping");
  if (found->second.mapped != 0) return wrong("memory is mapped twice");
  void* at = ::mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file,
                    static_cast<off_t>(found->second.offset));
  if (at == MAP_FAILED) return FULL;
  ++found->second.mapped;
  mapped[address] = Mapped{size, handle};
  return SUCCESS;
}
int cuMemUnmap(Address address, std::size_t size) {
  IN_CONTEXT("cuMemUnmap");
  std::size_t covered = 0;
  for (auto at = mapped.find(address); at != mapped.end() && at->first == address + covered && covered < size; ++at) {
    covered += at->second.size;
  }
  if (!is_reserved(address, size)) return wrong("an unmapping of addresses that were reserved apart");
  if (covered != size || size == 0) return wrong("an unmapping of what is not mapped, or of a part");
  for (const auto& [_, queue] : streams) {
    for (const auto& work : queue) {
      const auto meets = [&](Address begin) { return begin < address + size && address < begin + work.size; };
      if (work.size != 0 && (meets(work.address) || (work.kind == Kind::COPY && meets(work.source)))) {
        return wrong("an unmapping of what a stream will use");
      }
    }
  }
  for (std::size_t done = 0; done < size;) {
    const auto at = mapped.find(address + done);
    const auto [length, handle, _] = at->second;
    done += length;
    mapped.erase(at);
    --physical.at(handle).mapped;
    gone(handle);
  }
  ::mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return SUCCESS;
}
int cuMemSetAccess(Address address, std::size_t size, const Access* access, std::size_t count) {
  IN_CONTEXT("cuMemSetAccess");
  const auto [type, id] = access->location;
  if (count != 1 || type != 1 || id != 0 || access->flags != 3) return wrong("odd access");
  std::size_t covered = 0;
  for (auto at = mapped.find(address); at != mapped.end() && covered < size && at->first == address + covered; ++at) {
    covered += at->second.size;
    at->second.accessible = true;
  }
  if (!is_reserved(address, size)) return wrong("access to addresses that were reserved apart");
  if (covered != size) return wrong("access to what is not mapped");
  ::mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
  return SUCCESS;
}
int cuMemcpyAsync(Address target, Address source, std::size_t size, void* stream) {
  IN_CONTEXT("cuMemcpyAsync");
  if (!accessible(target, size) || !accessible(source, size)) return wrong("a copy of what is not there");
  return enqueue(stream, Work{Kind::COPY, target, source, size, 0});
}
int cuStreamSynchronize(void* stream) {
  IN_CONTEXT("cuStreamSynchronize");
  ++forced;
  run(stream);
  return SUCCESS;
}
int cuStreamWaitEvent(void* stream, Moment* event, unsigned) {
  IN_CONTEXT("cuStreamWaitEvent");
  if (events.count(event) == 0) return wrong("a wait for no event");
  return enqueue(stream, Work{Kind::WAIT, 0, 0, 0, 0, event->last});
}
int cuEventCreate(Moment** event, unsigned flags) {
  IN_CONTEXT("cuEventCreate");
  if (flags != 2) return wrong("an event with times");
  events.insert(*event = new Moment);
  return SUCCESS;
}
int cuEventRecord(Moment* event, void* stream) {
  IN_CONTEXT("cuEventRecord");
  if (events.count(event) == 0) return wrong("no event is recorded");
  event->last = std::make_shared<State>(State{stream});
  return enqueue(stream, Work{Kind::RECORD, 0, 0, 0, 0, event->last});
}
int cuEventQuery(Moment* event) {
  IN_CONTEXT("cuEventQuery");
  if (events.count(event) == 0) return wrong("no event is asked for");
  if (dice() % 2 == 0) advance_some();
  return event->last->passed ? SUCCESS : NOT_READY;
}
int cuEventSynchronize(Moment* event) {
  IN_CONTEXT("cuEventSynchronize");
  if (events.count(event) == 0) return wrong("no event is waited for");
  ++forced;
  run(event->last->stream, event->last);
  return SUCCESS;
}
}
