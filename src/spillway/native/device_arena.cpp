// An allocator for CUDA tensors that maps physical chunks of one size behind consecutive addresses: the window paper's
// virtual addressing (section 4), by the driver's calls. Chunks fit together in any order, so that no free chunk is too
// scattered to be used; what is lost is the rest of the last chunk of each tensor, and holes between small ones (rule 7).
//
// NOTE [Rules]
//  1. A freed mapping keeps its chunks and serves the next request, by four cases: (1) nothing is cached: chunks are
//     mapped anew; (2) one of the size is cached: it is taken; (3) smaller ones are: the largest of them grows, in place
//     where the addresses behind it are its own; (4) only larger ones are: the smallest of them is cut. The paper's code
//     asks for the addresses behind as it grows. Here more of them than are needed are reserved at once: the driver's
//     calls are then never about addresses that were reserved apart.
//  2. Chunks come from those that are free, then from cached mappings (the smallest that has enough, or else the largest
//     downwards), then from what is still to be unmapped, then from the driver: which never gives more than was in use
//     at once.
//  3. What a stream may still use is never unmapped: an event is recorded as memory is freed, on every stream that uses
//     it, and unmapping is put off until it has passed. A mapping that stays where it is passes from one stream to
//     another by a wait on the device; the host waits only where chunks are needed behind other addresses.
//  4. Where the driver has no more, everything that is cached goes back to it, and it is asked once more.
//  5. A call of the driver that fails leaves the books as they were, or what it was about lost: never used by two.
//  6. Paged out, a block's bytes lie in host memory mapped behind the same device address: slow, never wrong.
//  7. What is small shares a chunk with others of its stream, where that is asked for. The paper's code has a rule like
//     that, and does not call it. If another stream has used it, its stream waits for that one when it is freed.
//  8. The driver is found at run time, by declarations of our own: there is no toolkit.

#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Result = int;
using Address = std::uint64_t;
using Handle = std::uint64_t;
using Stream = void*;
using Event = void*;
using Context = void*;

constexpr Result SUCCESS = 0;
constexpr Result OUT_OF_MEMORY = 2;
constexpr Result INVALID_VALUE = 1;
constexpr Result NOT_READY = 600;
constexpr Result NOT_SUPPORTED = 801;
constexpr Result LOST = -1;  // none of the driver's
constexpr int ON_DEVICE = 1, ON_HOST = 2, ON_NUMA_NODE = 3;  // kinds of CUmemLocation
constexpr int PINNED = 1;
constexpr int READ_AND_WRITE = 3;
constexpr unsigned WITHOUT_TIMING = 2;
constexpr std::size_t ROOM = 4;         // times the addresses that are needed are reserved
constexpr std::size_t ALIGNMENT = 512;  // of what is small, as torch's caching allocator has it

std::size_t aligned(std::size_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

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
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "as cuda.h has them");

struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDeviceGet)(int*, int);
  Result (*cuDeviceTotalMem_v2)(std::size_t*, int);
  Result (*cuDevicePrimaryCtxRetain)(Context*, int);
  Result (*cuCtxPushCurrent_v2)(Context);
  Result (*cuCtxPopCurrent_v2)(Context*);
  Result (*cuMemGetAllocationGranularity)(std::size_t*, const Properties*, int);
  Result (*cuMemAddressReserve)(Address*, std::size_t, std::size_t, Address, std::uint64_t);
  Result (*cuMemAddressFree)(Address, std::size_t);
  Result (*cuMemCreate)(Handle*, std::size_t, const Properties*, std::uint64_t);
  Result (*cuMemRelease)(Handle);
  Result (*cuMemMap)(Address, std::size_t, std::size_t, Handle, std::uint64_t);
  Result (*cuMemUnmap)(Address, std::size_t);
  Result (*cuMemSetAccess)(Address, std::size_t, const Access*, std::size_t);
  Result (*cuMemcpyAsync)(Address, Address, std::size_t, Stream);
  Result (*cuStreamSynchronize)(Stream);
  Result (*cuStreamWaitEvent)(Stream, Event, unsigned);
  Result (*cuEventCreate)(Event*, unsigned);
  Result (*cuEventRecord)(Event, Stream);
  Result (*cuEventQuery)(Event);
  Result (*cuEventSynchronize)(Event);

  // The name of a symbol that is missing, or null.
  const char* find(void* library) {
#define FIND(name)                                                       \
  name = reinterpret_cast<decltype(name)>(::dlsym(library, #name)); \
  if (name == nullptr) return #name
    FIND(cuInit);
    FIND(cuDeviceGet);
    FIND(cuDeviceTotalMem_v2);
    FIND(cuDevicePrimaryCtxRetain);
    FIND(cuCtxPushCurrent_v2);
    FIND(cuCtxPopCurrent_v2);
    FIND(cuMemGetAllocationGranularity);
    FIND(cuMemAddressReserve);
    FIND(cuMemAddressFree);
    FIND(cuMemCreate);
    FIND(cuMemRelease);
    FIND(cuMemMap);
    FIND(cuMemUnmap);
    FIND(cuMemSetAccess);
    FIND(cuMemcpyAsync);
    FIND(cuStreamSynchronize);
    FIND(cuStreamWaitEvent);
    FIND(cuEventCreate);
    FIND(cuEventRecord);
    FIND(cuEventQuery);
    FIND(cuEventSynchronize);
#undef FIND
    return nullptr;
  }
};

// As `device_arena.DeviceCounts` in Python has it, in this order.
struct DeviceCounts {
  std::size_t requested, live, peak_live, cached, free, physical, peak_physical, on_host, lost;
  std::size_t anew, exact, grown, grown_in_place, cut, packed, host_waits;
};

class DeviceArena {
 public:
  DeviceArena(const Driver& driver, Context context, int device, std::size_t chunk, std::size_t limit, bool packs)
      : driver_(driver), context_(context), device_(device), chunk_(chunk), limit_(limit / chunk * chunk), packs_(packs) {}

  std::size_t chunk() const { return chunk_; }

  // Memory on the device, of which `stream` is the first user; 0 where there is none.
  Address take(std::size_t nbytes, Stream stream) {
    const Here here(*this);
    if (nbytes == 0 || nbytes > SIZE_MAX / ROOM - chunk_) return 0;
    sweep(false);
    const bool small = packs_ && nbytes <= chunk_ / 2;
    const Address address = small ? packed(aligned(nbytes), stream) : whole(nbytes, stream);
    if (address == 0) return 0;
    requested_.emplace(address, nbytes);
    counts_.requested += nbytes;
    return address;
  }

  // Whether it was ours. What is on the host goes back to the host.
  bool give(Address address) {
    const Here here(*this);
    const auto asked = requested_.find(address);
    if (asked == requested_.end()) return false;
    counts_.requested -= asked->second;
    if (const auto piece = pieces_.find(address); piece != pieces_.end()) {
      unpacked(piece);
    } else {
      free_mapping(live_.find(address));
    }
    requested_.erase(asked);
    return true;
  }

  // Another stream uses it from here on.
  bool used_by(Address address, Stream stream) {
    const Here here(*this);
    if (requested_.count(address) == 0) return false;
    const auto piece = pieces_.find(address);
    auto& streams = piece != pieces_.end() ? piece->second.streams : live_.at(address).streams;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
    return true;
  }

  // Rule 6, after everything that its streams have been given; the host waits for it. The driver's error, or 0.
  Result page_out(Address address, Stream stream) {
    const Here here(*this);
    if (requested_.count(address) == 0) return INVALID_VALUE;
    if (pieces_.count(address) != 0) return NOT_SUPPORTED;
    Mapping& mapping = live_.at(address);
    if (mapping.gone) return LOST;
    if (mapping.host != 0) return SUCCESS;
    if (const Result result = settled(mapping)) return result;
    std::vector<Handle> memory(1);
    if (const Result result = created_on_host(memory.front(), mapping.size)) return result;
    Result result = copied(address, memory, mapping.size, stream);
    if (result == SUCCESS) result = exchanged(mapping, mapping.chunks, chunk_, memory, mapping.size);
    if (result != SUCCESS) {
      for (const Handle handle : memory) driver_.cuMemRelease(handle);
      return result;
    }
    counts_.on_host += mapping.size;
    counts_.live -= mapping.size;
    mapping.host = memory.front();
    to_free(std::exchange(mapping.chunks, {}));
    return SUCCESS;
  }

  // Its bytes are on the device again. The driver's error, or 0.
  Result page_in(Address address, Stream stream) {
    const Here here(*this);
    if (requested_.count(address) == 0) return INVALID_VALUE;
    if (pieces_.count(address) != 0) return SUCCESS;
    Mapping& mapping = live_.at(address);
    if (mapping.gone) return LOST;
    if (mapping.host == 0) return SUCCESS;
    if (const Result result = settled(mapping)) return result;
    std::vector<Handle> chunks, host{mapping.host};
    if (!obtain(mapping.size / chunk_, chunks)) {
      give_all_back();
      if (!obtain(mapping.size / chunk_, chunks)) return OUT_OF_MEMORY;
    }
    Result result = copied(address, chunks, chunk_, stream);
    if (result == SUCCESS) result = exchanged(mapping, host, mapping.size, chunks, chunk_);
    if (result != SUCCESS) {
      to_free(std::move(chunks));
      return result;
    }
    driver_.cuMemRelease(std::exchange(mapping.host, 0));
    counts_.on_host -= mapping.size;
    add_live(mapping.size);
    mapping.chunks = std::move(chunks);
    return SUCCESS;
  }

  // Everything that no tensor has goes back to the driver; the host waits for it.
  void trim() {
    const Here here(*this);
    give_all_back();
  }

  DeviceCounts counts() {
    const std::lock_guard<std::mutex> guard(mutex_);
    DeviceCounts counts = counts_;
    counts.cached = 0;
    for (const auto& [_, mapping] : cached_) counts.cached += mapping.size;
    for (const auto& mapping : dying_) counts.cached += mapping.chunks.size() * chunk_;
    counts.free = free_.size() * chunk_;
    counts.lost = counts.physical - counts.live - counts.cached - counts.free;
    return counts;
  }

 private:
  // Addresses, given back when the last mapping in them is gone.
  struct Range {
    const Driver& driver;
    Address address;
    std::size_t size;
    Range(const Driver& its_driver, Address its_address, std::size_t its_size)
        : driver(its_driver), address(its_address), size(its_size) {}
    Range(const Range&) = delete;
    ~Range() { driver.cuMemAddressFree(address, size); }
  };
  // Up to where a stream has come; its event serves again when nobody asks any more.
  struct Moment {
    std::vector<Event>& spare;
    Event event;
    Moment(std::vector<Event>& its_spare, Event its_event) : spare(its_spare), event(its_event) {}
    Moment(const Moment&) = delete;
    ~Moment() { spare.push_back(event); }
  };
  struct Mapping {
    Address address = 0;
    std::size_t size = 0;
    std::vector<Handle> chunks;  // none while its bytes are on the host
    Handle host = 0;
    bool gone = false;  // nothing is mapped: what it held is lost
    std::shared_ptr<Range> range;  // that of what was cut off, too
    std::vector<Stream> streams;                                         // that use it
    std::vector<std::pair<Stream, std::shared_ptr<Moment>>> last_uses;  // have to pass before it is unmapped
  };
  using Live = std::unordered_map<Address, Mapping>;
  struct Slab {  // a chunk that small blocks of one stream share
    Stream stream;
    std::map<std::size_t, std::size_t> holes;  // offset: size
  };
  struct Piece {
    Address slab;
    std::size_t size;
    std::vector<Stream> streams;  // other than the slab's
  };

  // Our turn, in the device's primary context.
  class Here {
   public:
    explicit Here(DeviceArena& arena) : guard_(arena.mutex_), driver_(arena.driver_) {
      pushed_ = driver_.cuCtxPushCurrent_v2(arena.context_) == SUCCESS;
    }
    ~Here() {
      Context before = nullptr;
      if (pushed_) driver_.cuCtxPopCurrent_v2(&before);
    }

   private:
    const std::lock_guard<std::mutex> guard_;
    const Driver& driver_;
    bool pushed_;
  };

  Properties of(int where) const { return {PINNED, 0, {where, where == ON_DEVICE ? device_ : 0}, nullptr, 0}; }

  // Of the host, or of its first NUMA node, which is all that older drivers have.
  Result created_on_host(Handle& handle, std::size_t size) {
    Result result = NOT_SUPPORTED;
    for (const int where : {ON_HOST, ON_NUMA_NODE}) {
      std::size_t granularity = 0;
      const Properties properties = of(where);
      result = driver_.cuMemGetAllocationGranularity(&granularity, &properties, 0);
      if (result == SUCCESS && (granularity == 0 || size % granularity != 0)) result = NOT_SUPPORTED;
      if (result == SUCCESS) result = driver_.cuMemCreate(&handle, size, &properties, 0);
      if (result != INVALID_VALUE && result != NOT_SUPPORTED) return result;
    }
    return NOT_SUPPORTED;
  }

  // ------------------------------------------------------------------ whole and packed blocks

  Address whole(std::size_t nbytes, Stream stream) {
    const std::size_t size = (nbytes + chunk_ - 1) / chunk_ * chunk_;
    if (counts_.live + size > limit_) return 0;
    std::optional<Mapping> found = cached(size, stream);
    if (!found) {
      give_all_back();  // rule 4
      found = anew(size);
    }
    if (!found) return 0;
    found->streams.assign(1, stream);
    add_live(size);
    const Address address = found->address;
    live_.emplace(address, std::move(*found));
    return address;
  }

  void add_live(std::size_t size) {
    counts_.live += size;
    counts_.peak_live = std::max(counts_.peak_live, counts_.live);
  }

  void free_mapping(Live::iterator found) {
    Mapping mapping = std::move(found->second);
    live_.erase(found);
    if (mapping.gone) return;
    if (mapping.host == 0) counts_.live -= mapping.size;
    for (const Stream stream : std::exchange(mapping.streams, {})) {
      std::shared_ptr<Moment> moment;
      if (!recorded(stream, moment)) return lose(mapping.chunks, mapping.range);
      if (moment) mapping.last_uses.emplace_back(stream, std::move(moment));
    }
    if (mapping.host != 0) {
      dying_.push_back(std::move(mapping));
    } else {
      cache(std::move(mapping));
    }
  }

  // The smallest hole that is large enough, of all slabs of the stream.
  Address packed(std::size_t size, Stream stream) {
    Address best = 0;
    std::size_t at = 0, smallest = SIZE_MAX;
    for (auto& [address, slab] : slabs_) {
      if (slab.stream != stream) continue;
      for (const auto& [offset, hole] : slab.holes) {
        if (hole >= size && hole < smallest) std::tie(best, at, smallest) = std::tuple(address, offset, hole);
      }
    }
    if (best == 0) {
      best = whole(chunk_, stream);
      if (best == 0) return 0;
      smallest = chunk_;
      slabs_[best] = Slab{stream, {{0, chunk_}}};
    }
    auto& holes = slabs_[best].holes;
    holes.erase(at);
    if (smallest != size) holes.emplace(at + size, smallest - size);
    pieces_[best + at] = Piece{best, size, {}};
    ++counts_.packed;
    return best + at;
  }

  void unpacked(std::unordered_map<Address, Piece>::iterator found) {
    const auto& [address, piece] = *found;
    Slab& slab = slabs_[piece.slab];
    bool passes = true;
    for (const Stream stream : piece.streams) {  // who gets it next comes after them
      if (stream == slab.stream) continue;
      std::shared_ptr<Moment> moment;
      passes = passes && recorded(stream, moment) && (!moment || await(slab.stream, *moment));
    }
    if (!passes) {  // nobody gets it
      pieces_.erase(found);
      return;
    }
    auto& holes = slab.holes;
    std::size_t offset = address - piece.slab, size = piece.size;
    auto next = holes.lower_bound(offset);
    if (next != holes.end() && next->first == offset + size) {
      size += next->second;
      next = holes.erase(next);
    }
    if (next != holes.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
      std::prev(next)->second += size;
    } else {
      holes.emplace(offset, size);
    }
    if (holes.begin()->second == chunk_) {
      free_mapping(live_.find(piece.slab));
      slabs_.erase(piece.slab);
    }
    pieces_.erase(found);
  }

  // ------------------------------------------------------------------ the four cases

  std::optional<Mapping> cached(std::size_t size, Stream stream) {
    if (cached_.empty()) {
      ++counts_.anew;
      return anew(size);
    }
    auto at_least = cached_.lower_bound(size);
    if (at_least != cached_.end() && at_least->first == size) {
      for (auto same = at_least; same != cached_.end() && same->first == size; ++same) {
        if (is_of(same->second, stream)) at_least = same;  // needs no wait
      }
      ++counts_.exact;
      return handed_over(uncached(at_least), stream);
    }
    if (at_least != cached_.begin()) {
      ++counts_.grown;
      return grown(uncached(std::prev(at_least)), size, stream);
    }
    ++counts_.cut;
    return handed_over(cut(uncached(at_least), size), stream);
  }

  std::optional<Mapping> anew(std::size_t size) {
    std::vector<Handle> chunks;
    return obtain(size / chunk_, chunks) ? placed(std::move(chunks)) : std::nullopt;
  }

  std::optional<Mapping> grown(Mapping mapping, std::size_t size, Stream stream) {
    const std::size_t more = size - mapping.size;
    std::vector<Handle> chunks;
    if (!obtain(more / chunk_, chunks)) {
      cache(std::move(mapping));
      return std::nullopt;
    }
    const bool own = mapping.range.use_count() == 1 && size <= mapping.range->size;
    if (const auto added = chunks; own && map(mapping.address + mapping.size, chunks, chunk_, mapping.range) == SUCCESS) {
      mapping.chunks.insert(mapping.chunks.end(), added.begin(), added.end());
      mapping.size = size;
      ++counts_.grown_in_place;
      return handed_over(std::move(mapping), stream);
    }
    dying_.push_back(std::move(mapping));  // its chunks serve elsewhere, as soon as its addresses can go
    sweep(true);
    from_free(size / chunk_, chunks);
    if (chunks.size() == size / chunk_) return placed(std::move(chunks));
    to_free(std::move(chunks));
    return std::nullopt;
  }

  // What is cut off dies by itself; the addresses stay until both parts are gone.
  Mapping cut(Mapping mapping, std::size_t size) {
    Mapping rest;
    rest.address = mapping.address + size;
    rest.size = mapping.size - size;
    const auto first = mapping.chunks.begin() + static_cast<std::ptrdiff_t>(size / chunk_);
    rest.chunks.assign(first, mapping.chunks.end());
    mapping.chunks.erase(first, mapping.chunks.end());
    mapping.size = size;
    rest.range = mapping.range;
    rest.last_uses = mapping.last_uses;
    dying_.push_back(std::move(rest));
    return mapping;
  }

  // ------------------------------------------------------------------ physical memory

  // So many chunks (rule 2); if there are not enough, none.
  bool obtain(std::size_t wanted, std::vector<Handle>& chunks) {
    from_free(wanted, chunks);
    while (chunks.size() < wanted && !cached_.empty()) {
      const std::size_t rest = (wanted - chunks.size()) * chunk_;
      auto victim = cached_.lower_bound(rest);
      if (victim == cached_.end()) victim = std::prev(victim);
      dying_.push_back(uncached(victim));
      sweep(true);
      from_free(wanted, chunks);
    }
    if (chunks.size() < wanted && !dying_.empty()) {
      sweep(true);
      from_free(wanted, chunks);
    }
    const std::size_t before = chunks.size();
    while (chunks.size() < wanted) {
      Handle handle = 0;
      const Properties properties = of(ON_DEVICE);
      if (counts_.physical + chunk_ > limit_ || driver_.cuMemCreate(&handle, chunk_, &properties, 0) != SUCCESS) break;
      counts_.physical += chunk_;
      chunks.push_back(handle);
    }
    if (chunks.size() == wanted) {
      counts_.peak_physical = std::max(counts_.peak_physical, counts_.physical);
      return true;
    }
    for (; chunks.size() > before; chunks.pop_back()) release(chunks.back());  // others may want them
    to_free(std::exchange(chunks, {}));
    return false;
  }

  void from_free(std::size_t wanted, std::vector<Handle>& chunks) {
    while (chunks.size() < wanted && !free_.empty()) {
      chunks.push_back(free_.back());
      free_.pop_back();
    }
  }

  void to_free(std::vector<Handle> chunks) { free_.insert(free_.end(), chunks.begin(), chunks.end()); }

  void give_all_back() {
    while (!cached_.empty()) dying_.push_back(uncached(cached_.begin()));
    sweep(true);
    for (const Handle handle : std::exchange(free_, {})) release(handle);
  }

  void release(Handle handle) {
    if (driver_.cuMemRelease(handle) == SUCCESS) counts_.physical -= chunk_;
  }

  // ------------------------------------------------------------------ mappings

  std::shared_ptr<Range> reserved(std::size_t size) {
    Address address = 0;
    if (driver_.cuMemAddressReserve(&address, size, 0, 0, 0) != SUCCESS) return nullptr;
    return std::make_shared<Range>(driver_, address, size);
  }

  // Chunks behind addresses of their own; where that fails they are free.
  std::optional<Mapping> placed(std::vector<Handle> chunks) {
    Mapping mapping;
    mapping.size = chunks.size() * chunk_;
    mapping.range = reserved(ROOM * mapping.size);
    if (mapping.range != nullptr) {
      mapping.address = mapping.range->address;
      mapping.chunks = chunks;
      if (map(mapping.address, chunks, chunk_, mapping.range) == SUCCESS) return mapping;
    }
    to_free(std::move(chunks));
    return std::nullopt;
  }

  // All of them, or none. What can neither be used there nor unmapped again is lost, and no handle is left.
  Result map(Address address, std::vector<Handle>& handles, std::size_t each,
             const std::shared_ptr<Range>& range) {
    std::size_t mapped = 0;
    Result result = SUCCESS;
    while (mapped < handles.size()) {
      result = driver_.cuMemMap(address + mapped * each, each, 0, handles[mapped], 0);
      if (result != SUCCESS) break;
      ++mapped;
    }
    const Access access{{ON_DEVICE, device_}, READ_AND_WRITE};
    if (result == SUCCESS) result = driver_.cuMemSetAccess(address, handles.size() * each, &access, 1);
    if (result != SUCCESS && mapped != 0 && driver_.cuMemUnmap(address, mapped * each) != SUCCESS) lose(handles, range);
    return result;
  }

  void lose(std::vector<Handle>& handles, const std::shared_ptr<Range>& range) {
    handles.clear();
    lost_.push_back(range);
  }

  // A live mapping gets other memory behind its addresses. If that fails it has what it had, or none (rule 5).
  Result exchanged(Mapping& mapping, std::vector<Handle> old, std::size_t old_each, std::vector<Handle>& fresh,
                   std::size_t fresh_each) {
    const Result result = driver_.cuMemUnmap(mapping.address, mapping.size);
    if (result != SUCCESS) return result;
    const Result mapped = map(mapping.address, fresh, fresh_each, mapping.range);
    if (mapped == SUCCESS || map(mapping.address, old, old_each, mapping.range) == SUCCESS) return mapped;
    mapping.gone = true;
    if (mapping.host == 0) {
      counts_.live -= mapping.size;
      to_free(std::move(old));
    } else {
      counts_.on_host -= mapping.size;
      for (const Handle handle : old) driver_.cuMemRelease(handle);
    }
    mapping.host = 0;
    mapping.chunks.clear();
    return LOST;
  }

  // What a block holds, into memory that is mapped elsewhere for as long as that takes.
  Result copied(Address block, std::vector<Handle>& handles, std::size_t each, Stream stream) {
    const std::size_t size = handles.size() * each;
    const auto range = reserved(size);
    if (!range) return OUT_OF_MEMORY;
    const Address beside = range->address;
    if (const Result result = map(beside, handles, each, range)) return result;
    const Result begun = driver_.cuMemcpyAsync(beside, block, size, stream);
    const Result done = driver_.cuStreamSynchronize(stream);
    ++counts_.host_waits;
    if (done != SUCCESS) {
      lose(handles, range);
      return done;
    }
    const Result unmapped = driver_.cuMemUnmap(beside, size);
    if (unmapped != SUCCESS) lose(handles, range);
    return begun != SUCCESS ? begun : unmapped;
  }

  // Every stream that was to use it has done so.
  Result settled(const Mapping& mapping) {
    for (const Stream stream : mapping.streams) {
      ++counts_.host_waits;
      if (const Result result = driver_.cuStreamSynchronize(stream)) return result;
    }
    return SUCCESS;
  }

  // ------------------------------------------------------------------ what was freed

  using Cached = std::multimap<std::size_t, Mapping>;

  void cache(Mapping mapping) { cached_.emplace(mapping.size, std::move(mapping)); }

  Mapping uncached(Cached::iterator at) {
    Mapping mapping = std::move(at->second);
    cached_.erase(at);
    return mapping;
  }

  static bool is_of(const Mapping& mapping, Stream stream) {
    return std::all_of(mapping.last_uses.begin(), mapping.last_uses.end(),
                       [&](const auto& use) { return use.first == stream; });
  }

  // To a stream that comes after those who used it before.
  std::optional<Mapping> handed_over(Mapping mapping, Stream stream) {
    for (const auto& [user, moment] : std::exchange(mapping.last_uses, {})) {
      if (user == stream || await(stream, *moment)) continue;
      lose(mapping.chunks, mapping.range);
      return std::nullopt;
    }
    return mapping;
  }

  // On the device; by the host where that cannot be. False if neither can.
  bool await(Stream stream, const Moment& moment) {
    if (driver_.cuStreamWaitEvent(stream, moment.event, 0) == SUCCESS) return true;
    ++counts_.host_waits;
    return driver_.cuEventSynchronize(moment.event) == SUCCESS;
  }

  // Up to where a stream has come; no moment where the host has waited for it instead. False if it could not either.
  bool recorded(Stream stream, std::shared_ptr<Moment>& moment) {
    Event event = nullptr;
    bool made = !spare_.empty();
    if (made) {
      event = spare_.back();
      spare_.pop_back();
    } else {
      made = driver_.cuEventCreate(&event, WITHOUT_TIMING) == SUCCESS;
    }
    if (made) {
      moment = std::make_shared<Moment>(spare_, event);
      if (driver_.cuEventRecord(event, stream) == SUCCESS) return true;
      moment = nullptr;
    }
    ++counts_.host_waits;
    return driver_.cuStreamSynchronize(stream) == SUCCESS;
  }

  // Unmaps what nobody uses any more; with `wait`, everything that is to be unmapped.
  void sweep(bool wait) {
    for (auto mapping = dying_.begin(); mapping != dying_.end();) {
      if (!passed(*mapping, wait)) {
        ++mapping;
        continue;
      }
      if (driver_.cuMemUnmap(mapping->address, mapping->size) != SUCCESS) {
        lose(mapping->chunks, mapping->range);
      } else if (mapping->host != 0) {
        driver_.cuMemRelease(mapping->host);
        counts_.on_host -= mapping->size;
      } else {
        to_free(std::move(mapping->chunks));
      }
      mapping = dying_.erase(mapping);
    }
  }

  bool passed(Mapping& mapping, bool wait) {
    auto& uses = mapping.last_uses;
    while (!uses.empty()) {
      const Event event = uses.back().second->event;
      Result result = driver_.cuEventQuery(event);
      if (result == NOT_READY && wait) {
        ++counts_.host_waits;
        result = driver_.cuEventSynchronize(event);
      }
      if (result != SUCCESS) return false;
      uses.pop_back();
    }
    return true;
  }

  const Driver driver_;
  const Context context_;
  const int device_;
  const std::size_t chunk_, limit_;
  const bool packs_;
  std::mutex mutex_;
  std::vector<Event> spare_;
  std::unordered_map<Address, std::size_t> requested_;  // bytes
  Live live_;                                           // slabs too
  std::map<Address, Slab> slabs_;
  std::unordered_map<Address, Piece> pieces_;
  Cached cached_;             // by size
  std::list<Mapping> dying_;  // to be unmapped
  std::vector<std::shared_ptr<Range>> lost_;
  std::vector<Handle> free_;
  DeviceCounts counts_{};
};

constexpr int DEVICES = 64;
DeviceArena* arenas[DEVICES] = {};  // never destroyed: tensors outlive the interpreter
std::mutex opening;

DeviceArena* arena_of(int device) { return device >= 0 && device < DEVICES ? arenas[device] : nullptr; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Opens the arena of a device: null, or what was missing or which call failed. A chunk of 0 bytes is as small as the
// device allows, and another one is rounded up to that; a limit of 0 is none.
const char* spillway_device_open(const char* name, int device, std::size_t chunk, std::size_t limit, int packs,
                                 int* error) {
  const std::lock_guard<std::mutex> guard(opening);
  *error = 0;
  if (device < 0 || device >= DEVICES) return "a device of that number";
  if (arenas[device] != nullptr) return nullptr;
  void* library = ::dlopen(name, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return "the driver's library";
  Driver driver;
  if (const char* missing = driver.find(library)) return missing;
  if ((*error = driver.cuInit(0))) return "cuInit";
  int ordinal = 0;
  if ((*error = driver.cuDeviceGet(&ordinal, device))) return "cuDeviceGet";
  Context context = nullptr;
  if ((*error = driver.cuDevicePrimaryCtxRetain(&context, ordinal))) return "cuDevicePrimaryCtxRetain";
  const Properties properties{PINNED, 0, {ON_DEVICE, ordinal}, nullptr, 0};
  std::size_t smallest = 0;
  if ((*error = driver.cuMemGetAllocationGranularity(&smallest, &properties, 0))) return "cuMemGetAllocationGranularity";
  std::size_t total = 0;
  if ((*error = driver.cuDeviceTotalMem_v2(&total, ordinal))) return "cuDeviceTotalMem_v2";
  const std::size_t each = (std::max(chunk, smallest) + smallest - 1) / smallest * smallest;
  arenas[device] = new DeviceArena(driver, context, ordinal, each, limit == 0 ? total : std::min(limit, total), packs != 0);
  return nullptr;
}

std::size_t spillway_device_chunk(int device) { return arena_of(device)->chunk(); }
std::uint64_t spillway_device_take(int device, std::size_t nbytes, void* stream) {
  return arena_of(device)->take(nbytes, stream);
}
int spillway_device_give(int device, std::uint64_t address) { return arena_of(device)->give(address) ? 1 : 0; }
int spillway_device_used_by(int device, std::uint64_t address, void* stream) {
  return arena_of(device)->used_by(address, stream) ? 1 : 0;
}
int spillway_device_page_out(int device, std::uint64_t address, void* stream) {
  return arena_of(device)->page_out(address, stream);
}
int spillway_device_page_in(int device, std::uint64_t address, void* stream) {
  return arena_of(device)->page_in(address, stream);
}
void spillway_device_trim(int device) { arena_of(device)->trim(); }
void spillway_device_counts(int device, DeviceCounts* counts) { *counts = arena_of(device)->counts(); }

// As `torch.cuda.memory.CUDAPluggableAllocator` calls them, which does not look at what it gets.
void* spillway_device_malloc(std::ptrdiff_t nbytes, int device, void* stream) {
  if (nbytes == 0) return nullptr;
  DeviceArena* const arena = arena_of(device);
  TORCH_CHECK_WITH(OutOfMemoryError, arena != nullptr, "Spillway's arena was not opened on device ", device, ".");
  const Address address = nbytes < 0 ? 0 : arena->take(static_cast<std::size_t>(nbytes), stream);
  TORCH_CHECK_WITH(OutOfMemoryError, address != 0, "CUDA out of memory: ", nbytes, " bytes were asked for on device ",
                   device, ", where ", arena->counts().live, " are in use by tensors.");
  return reinterpret_cast<void*>(address);
}
void spillway_device_free(void* memory, std::ptrdiff_t, int device, void*) {
  if (memory != nullptr) arena_of(device)->give(reinterpret_cast<Address>(memory));
}
void spillway_device_record(void* memory, void* stream) {
  for (DeviceArena* const arena : arenas) {
    if (arena != nullptr && arena->used_by(reinterpret_cast<Address>(memory), stream)) return;
  }
}
}
#pragma GCC visibility pop
