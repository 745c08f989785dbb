// An allocator for CPU tensors that keeps physical pages apart from the addresses at which they are used: the window
// paper's virtual addressing (section 4), for main memory.
//
// One large range of addresses is reserved. A piece of it is used (a tensor's), warm (free, its pages still there) or
// cold (addresses without pages). A tensor is born in a warm extent that is large enough, or else in a cold one, to
// which pages of several warm extents are moved (`mremap`): few pages are faulted in or zeroed a second time (rule 3).
//
// NOTE [Rules]
//  1. Pages are faulted in only where all that are warm were not enough, or for as many that were given back (rules 2
//     and 3). So what is resident never passes the most that was used at once, rounded up to pages, however fragmented
//     the addresses are.
//  2. Where pages cannot be moved (an old kernel, too many mappings), as many are given back to the system as are faulted
//     in instead. Rule 1 holds all the same.
//     A call of the system that fails may leave a hole. Its addresses are lost: nothing is mapped there and nobody gets
//     them, as somebody else's mapping may come to lie there. So what is ours is what `used_` has, and not what lies in
//     the range.
//  3. The kernel moves pages mapping by mapping: `cuts_` holds every offset at which a mapping may begin. More than
//     MAPPINGS are healed, by giving the warm pages back: a mapping anew over the whole extent is one mapping. So is an
//     extent of several mappings, shorter than SHORT on average, whose pages are wanted elsewhere.
//  4. What is small, what is more than the machine has, and what the range or the system has no room for, is torch's own
//     allocator's, and so is the error.
//  5. Nothing here is ever destroyed: tensors outlive the interpreter.
//  6. A trace counts what is born while it is open, in the arena or not, and that of it dies; and of storages that it was
//     told of, that they die. A thread that has a trace of its own open counts for that one alone, and one that is in a
//     step of a session that watches every op for none.
//  7. A fork waits for the lock, so that the child finds the books whole. Its pages are its own (copy on write): what
//     lies in a file (rule 8) is mapped privately from then on, and its place there is nobody else's.
//  8. While an op runs (`OpMemory`), what its thread takes counts on top of the session's account. What would pass the
//     budget lies in a file without a name, mapped, until it is freed: the system can have those pages back. A file
//     system without room for it is out of memory.
//  9. A step may run unwatched: then all that its thread takes counts as that of one op does, what is small too, by what
//     malloc gives. Whatever was born in such steps counts until it is gone, in whatever thread, or until the account
//     takes it over (`adopt`). Too much may be counted, never too little: who counts a small block is known by the
//     function that frees it, of which there are SHARES, and sessions beyond that many have one together.
//     In a watched step so does what its thread takes outside of any op (`torch.load`), what is small left out: whoever
//     watches is asked for room first.
// 10. A trace may be guarded: what its own thread takes lies in such a file as well where the trace would hold more than
//     it is allowed, and the trace does not count it. Where there is no room for it, it is taken, and counts.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>
#include <utility>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t SMALL = std::size_t{32} << 10;  // bytes below which a page's rounding costs too much
constexpr int CANDIDATES = 16;                        // extents that are looked at before addresses anew
constexpr std::size_t MAPPINGS = 2048;                // each is a move of its own, and the step that wants the pages waits
constexpr std::size_t SHORT = std::size_t{64} << 10;  // on average: moving shorter mappings takes longer than faults
constexpr std::size_t MOVABLE = 32768;                // half of the mappings that a process may have by default
constexpr std::size_t CHUNK = std::size_t{1} << 20;   // of a file, for what is small
constexpr std::size_t ALIGNMENT = 64;                 // torch's
constexpr std::size_t SHARES = 32;                    // of what is small
constexpr std::size_t TRACES = 32;                    // at a time
constexpr std::uint8_t PRIORITY = 100;                // among those who set torch's allocator

std::size_t pages(std::size_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

// Extents by offset and by size; neighbours are one extent.
class Extents {
 public:
  bool empty() const { return at_.empty(); }
  std::size_t bytes() const { return bytes_; }
  const std::map<std::size_t, std::size_t>& all() const { return at_; }

  void add(std::size_t offset, std::size_t size) {
    if (size == 0) return;
    bytes_ += size;
    auto next = at_.lower_bound(offset);
    if (next != at_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        offset = before->first;
        size += before->second;
        erase(before);
      }
    }
    if (next != at_.end() && offset + size == next->first) {
      size += next->second;
      erase(next);
    }
    insert(offset, size);
  }

  // The smallest extent of at least `size` bytes, else the largest: its offset and size. There has to be one.
  std::pair<std::size_t, std::size_t> best(std::size_t size) const {
    auto found = by_size_.lower_bound({size, 0});
    if (found == by_size_.end()) found = std::prev(found);
    return {found->second, found->first};
  }

  // Bytes of the extent that begins there; 0 if none does.
  std::size_t at(std::size_t offset) const {
    const auto found = at_.find(offset);
    return found == at_.end() ? 0 : found->second;
  }
  // From the largest to the smallest: size and offset.
  auto largest() const { return by_size_.crbegin(); }
  auto smaller() const { return by_size_.crend(); }

  // The first `size` bytes of the extent at `offset`.
  void take(std::size_t offset, std::size_t size) {
    auto found = at_.find(offset);
    const std::size_t rest = found->second - size;
    erase(found);
    if (rest != 0) insert(offset + size, rest);
    bytes_ -= size;
  }

 private:
  void insert(std::size_t offset, std::size_t size) {
    at_.emplace(offset, size);
    by_size_.emplace(size, offset);
  }
  void erase(std::map<std::size_t, std::size_t>::iterator extent) {
    by_size_.erase({extent->second, extent->first});
    at_.erase(extent);
  }

  std::map<std::size_t, std::size_t> at_;
  std::set<std::pair<std::size_t, std::size_t>> by_size_;
  std::size_t bytes_ = 0;
};

struct Counts {  // as `arena.Counts` in Python has it, in this order
  std::size_t live, peak_live, resident, peak_resident, blocks, fitted, collected, moves, moved, faulted, mappings;
};

struct Born {
  std::size_t nbytes;
  std::uint64_t moment;  // how many traces had begun by then
  std::uint32_t traces;  // that count it, a bit each
};

class OpMemory;
OpMemory*& op_memory();

struct Block {
  std::size_t size;  // in pages
  bool told;         // whether the profiler heard of it
  Born born;
  std::uint64_t op;    // in which it was born; 0 outside of any
  OpMemory* unwatched;  // in whose unwatched steps, or outside of the ops of whose watched ones; null elsewhere
};

// What has come since a moment, less what of it is gone: with what was known then, a step's memory above its beginning.
struct Trace {
  bool open = false;
  std::uint64_t owner = 0;   // the thread that began it
  std::uint64_t moment = 0;  // which trace it is
  std::int64_t held = 0, peak = 0;
  std::int64_t most = 0;        // that it may hold, if somebody lends what is more
  OpMemory* lender = nullptr;  // null where it is not guarded
  std::unordered_map<std::uintptr_t, std::size_t> known;  // by address: what was there, and counts until it is gone

  void forget(std::uintptr_t address) {
    const auto found = known.find(address);
    if (found == known.end()) return;
    held -= static_cast<std::int64_t>(found->second);
    known.erase(found);
  }
};

std::uint64_t this_thread() {
  static std::atomic<std::uint64_t> threads{0};
  thread_local const std::uint64_t number = ++threads;
  return number;
}

class Arena {
 public:
  // Reserves addresses: 0, or the system's error number.
  int reserve(std::size_t span) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (base_ != nullptr) return 0;
    void* range = ::mmap(nullptr, span, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
    if (range == MAP_FAILED) return errno;
    base_ = static_cast<char*>(range);
    span_ = span;
    cold_.add(0, span);
    return 0;
  }

  bool owns(const void* address) {
    if (!within(address)) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    return used_.count(offset_of(address)) != 0;
  }

  // Memory for a tensor, or null where there is no room for it here.
  void* take(std::size_t nbytes, bool told, std::uint64_t op, OpMemory* unwatched) {
    if (nbytes > span_) return nullptr;  // also what is negative
    const std::size_t size = pages(nbytes);
    std::lock_guard<std::mutex> guard(mutex_);
    std::size_t offset = 0;
    if (!warm_.empty() && warm_.best(size).second >= size) {
      offset = warm_.best(size).first;
      warm_.take(offset, size);
      ++counts_.fitted;
    } else {
      std::size_t begun = 0;  // bytes that are there already
      if (const auto extent = extendable(size); extent.second != 0) {
        std::tie(offset, begun) = extent;
        warm_.take(offset, begun);
      } else {
        if (cold_.empty() || cold_.best(size).second < size) return nullptr;
        offset = cold_.best(size).first;
      }
      cold_.take(offset + begun, size - begun);
      if (!collect(offset + begun, size - begun)) {
        warm_.add(offset, begun);
        return nullptr;
      }
      counts_.peak_resident = std::max(counts_.peak_resident, counts_.live + size + warm_.bytes());
    }
    used_.emplace(offset, Block{size, told, count(base_ + offset, nbytes), op, unwatched});
    ++counts_.blocks;
    counts_.live += size;
    counts_.peak_live = std::max(counts_.peak_live, counts_.live);
    return base_ + offset;
  }

  // What it was; of size 0 for what is not ours.
  Block give(void* address) {
    if (!within(address)) return {};
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = used_.find(offset_of(address));
    if (found == used_.end()) return {};
    const Block block = found->second;
    discount(address, block.born);
    counts_.live -= block.size;
    warm_.add(found->first, block.size);
    used_.erase(found);
    return block;
  }

  // Whether it was born in an unwatched step of that session.
  bool made_by(const void* address, const OpMemory* unwatched) {
    if (!within(address)) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = used_.find(offset_of(address));
    return found != used_.end() && found->second.unwatched == unwatched;
  }
  // From now on it is as if it had been born in a step that is watched; bytes, or 0 if it was.
  std::size_t disown(const void* address, const OpMemory* unwatched) {
    if (!within(address)) return 0;
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = used_.find(offset_of(address));
    if (found == used_.end() || found->second.unwatched != unwatched) return 0;
    found->second.unwatched = nullptr;
    return found->second.born.nbytes;
  }

  // What torch's own allocator gave out and got back for us.
  void born_outside(const void* memory, std::size_t nbytes) {
    if (open_ == 0) return;
    std::lock_guard<std::mutex> guard(mutex_);
    outside_[memory] = count(memory, nbytes);
    known_outside_ = outside_.size();
  }
  void died_outside(const void* memory) {
    if (open_ == 0 && known_outside_ == 0) return;
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = outside_.find(memory);
    discount(memory, found == outside_.end() ? Born{} : found->second);
    if (found != outside_.end()) outside_.erase(found);
    known_outside_ = outside_.size();
  }

  // Begins a trace of this thread: its place, or -1 where all are taken.
  int trace(const std::uintptr_t* addresses, const std::size_t* sizes, std::size_t count) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (std::size_t place = 0; place < TRACES; ++place) {
      if (traces_[place].open) continue;
      traces_[place] = Trace{};
      traces_[place].open = true;
      traces_[place].owner = this_thread();
      traces_[place].moment = ++begun_;
      for (std::size_t one = 0; one < count; ++one) traces_[place].known.emplace(addresses[one], sizes[one]);
      running_.push_back(place);
      open_ = running_.size();
      return static_cast<int>(place);
    }
    return -1;
  }
  void forget(int place, std::uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    traces_[static_cast<std::size_t>(place)].forget(address);
  }
  // From now on it holds so much at most, of what this thread takes (rule 10).
  void guard(int place, std::int64_t most, OpMemory* lender) {
    std::lock_guard<std::mutex> guard(mutex_);
    traces_[static_cast<std::size_t>(place)].most = most;
    traces_[static_cast<std::size_t>(place)].lender = lender;
    guarded() = place;
  }
  void unguard() { guarded() = -1; }
  // Who lends this thread so much, where a trace of its own has no room for it; else null.
  OpMemory* lender(std::size_t nbytes) {
    if (guarded() < 0) return nullptr;
    std::lock_guard<std::mutex> guard(mutex_);
    const Trace& trace = traces_[static_cast<std::size_t>(guarded())];
    if (trace.lender == nullptr || trace.owner != this_thread()) {
      guarded() = -1;  // it has ended
      return nullptr;
    }
    return trace.held + static_cast<std::int64_t>(nbytes) > trace.most ? trace.lender : nullptr;
  }
  // Bytes held now, and the most since this was asked last.
  std::pair<std::int64_t, std::int64_t> since(int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    Trace& trace = traces_[static_cast<std::size_t>(place)];
    return {trace.held, std::exchange(trace.peak, trace.held)};
  }
  void end_trace(int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    traces_[static_cast<std::size_t>(place)] = Trace{};
    running_.erase(std::find(running_.begin(), running_.end(), static_cast<std::size_t>(place)));
    open_ = running_.size();
  }

  // Gives warm pages back to the system until at most `keep` bytes of them are left.
  void trim(std::size_t keep) {
    std::lock_guard<std::mutex> guard(mutex_);
    while (warm_.bytes() > keep) {
      const auto [offset, size] = warm_.best(span_);
      give_back(offset, std::min(size, pages(warm_.bytes() - keep)));
    }
  }

  Counts counts() {
    std::lock_guard<std::mutex> guard(mutex_);
    Counts counts = counts_;
    counts.resident = counts_.live + warm_.bytes();
    counts.mappings = cuts_.size();
    return counts;
  }

  void reset_peaks() {
    std::lock_guard<std::mutex> guard(mutex_);
    counts_.peak_live = counts_.live;
    counts_.peak_resident = counts_.live + warm_.bytes();
  }

  std::mutex& mutex() { return mutex_; }

 private:
  static constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

  // The guarded trace that this thread began last; -1 without one.
  static int& guarded() {
    thread_local int place = -1;
    return place;
  }

  bool within(const void* address) const {
    const char* byte = static_cast<const char*>(address);
    return byte >= base_ && byte < base_ + span_;
  }
  std::size_t offset_of(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - base_);
  }

  Born count(const void* memory, std::size_t nbytes) {
    Born born{nbytes, begun_, 0};
    if (open_ == 0) return born;
    const std::uint64_t thread = this_thread();
    const bool has_own = std::any_of(running_.begin(), running_.end(),
                                     [&](std::size_t place) { return traces_[place].owner == thread; });
    const bool counts_itself = !has_own && op_memory() != nullptr;  // in a step of a session that watches every op
    for (const std::size_t place : running_) {
      Trace& trace = traces_[place];
      trace.forget(reinterpret_cast<std::uintptr_t>(memory));  // whoever had this address went unheard
      if (counts_itself || (has_own && trace.owner != thread)) continue;
      born.traces |= std::uint32_t{1} << place;
      trace.held += static_cast<std::int64_t>(nbytes);
      trace.peak = std::max(trace.peak, trace.held);
    }
    return born;
  }
  void discount(const void* memory, const Born& born) {
    if (open_ == 0) return;
    for (const std::size_t place : running_) {
      Trace& trace = traces_[place];
      if ((born.traces >> place & 1) != 0 && born.moment >= trace.moment) {
        trace.held -= static_cast<std::int64_t>(born.nbytes);
      } else {
        trace.forget(reinterpret_cast<std::uintptr_t>(memory));
      }
    }
  }

  // A large warm extent that the addresses behind it can make large enough: only the rest has to be collected.
  std::pair<std::size_t, std::size_t> extendable(std::size_t size) const {
    int looked_at = 0;
    for (auto extent = warm_.largest(); extent != warm_.smaller() && looked_at < CANDIDATES; ++extent, ++looked_at) {
      const auto [length, offset] = *extent;
      if (cold_.at(offset + length) >= size - length) return {offset, length};
    }
    return {0, 0};
  }

  // Puts pages behind addresses that were taken from the cold ones (rules 1 to 3); false if the system gives no mapping.
  bool collect(std::size_t offset, std::size_t size) {
    if (cuts_.size() > heal_at_) heal();
    const std::size_t wanted = std::min(size, warm_.bytes());
    std::size_t filled = 0, given = 0;
    bool whole = true;
    if (wanted != 0) ++counts_.collected;
    while (filled + given < wanted) {
      auto [from, length] = warm_.best(wanted - filled - given);
      length = std::min(length, wanted - filled - given);
      const std::size_t mappings = mappings_in(from, length);
      if (!whole || !moves_ || cuts_.size() > MOVABLE || (mappings > 1 && length / mappings < SHORT)) {  // rules 2, 3
        give_back(from, length);
        given += length;
        continue;
      }
      warm_.take(from, length);
      const std::size_t moved = move(from, length, offset + filled);
      cold_.add(from, moved);
      if (moved < length) warm_.add(from + moved, length - moved);
      filled += moved;
      whole = moved == length;
    }
    const std::size_t fresh = size - filled;
    if (fresh != 0 && (!whole || mappings_in(offset + filled, fresh) > 1) && !one_mapping(offset + filled, fresh)) {
      warm_.add(offset, filled);  // the other addresses are lost: nobody may have them
      return false;
    }
    counts_.faulted += fresh;
    return true;
  }

  // Moves the pages of an extent, mapping by mapping; how many bytes of it were moved.
  std::size_t move(std::size_t from, std::size_t length, std::size_t to) {
    std::size_t done = 0;
    while (done < length) {
      const auto next = cuts_.upper_bound(from + done);
      const std::size_t end = next == cuts_.end() ? from + length : std::min(*next, from + length);
      const std::size_t piece = end - from - done;
      void* moved = ::mremap(base_ + from + done, piece, piece, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP,
                             base_ + to + done);
      if (moved == MAP_FAILED) {
        moves_ = errno != EINVAL;  // this kernel cannot
        break;
      }
      cut(to + done, piece);
      ++counts_.moves;
      counts_.moved += piece;
      done += piece;
    }
    return done;
  }

  // The pages of a warm extent, or of its first bytes, go back to the system.
  void give_back(std::size_t offset, std::size_t size) {
    warm_.take(offset, size);
    if (one_mapping(offset, size) || emptied(offset, size)) cold_.add(offset, size);
  }
  // Whether there is no hole in it (rule 2), and no page either now.
  bool emptied(std::size_t offset, std::size_t size) const {
    return ::madvise(base_ + offset, size, MADV_DONTNEED) == 0;
  }

  // Maps anew: one mapping, without pages.
  bool one_mapping(std::size_t offset, std::size_t size) {
    void* mapped = ::mmap(base_ + offset, size, PROT_READ | PROT_WRITE, FLAGS | MAP_FIXED, -1, 0);
    if (mapped != MAP_FAILED) cut(offset, size);
    return mapped != MAP_FAILED;
  }

  void heal() {
    while (!warm_.empty()) {
      const auto [offset, size] = warm_.best(span_);
      give_back(offset, size);
    }
    const auto extents = cold_.all();
    for (const auto& [offset, size] : extents) {
      if (!one_mapping(offset, size) && !emptied(offset, size)) cold_.take(offset, size);
    }
    heal_at_ = std::max(MAPPINGS, 2 * cuts_.size());  // what is used is healed when it is free
  }

  // A mapping begins and ends here, and none between.
  void cut(std::size_t offset, std::size_t size) {
    cuts_.erase(cuts_.upper_bound(offset), cuts_.lower_bound(offset + size));
    cuts_.insert(offset);
    cuts_.insert(offset + size);
  }
  std::size_t mappings_in(std::size_t offset, std::size_t size) const {
    return 1 + static_cast<std::size_t>(std::distance(cuts_.upper_bound(offset), cuts_.lower_bound(offset + size)));
  }

  std::mutex mutex_;
  char* base_ = nullptr;
  std::size_t span_ = 0;
  bool moves_ = true;
  std::size_t heal_at_ = MAPPINGS;
  Extents warm_, cold_;
  std::unordered_map<std::size_t, Block> used_;     // by offset
  std::unordered_map<const void*, Born> outside_;  // born in a trace
  std::array<Trace, TRACES> traces_;
  std::vector<std::size_t> running_;  // of these
  std::uint64_t begun_ = 0;                                  // traces
  std::atomic<std::size_t> open_{0}, known_outside_{0};  // read before the lock is taken
  std::set<std::size_t> cuts_;
  Counts counts_{};
};

Arena& arena() {
  static Arena* const only = new Arena;  // rule 5
  return *only;
}

// Of the session whose step this thread runs.
OpMemory*& op_memory() {
  thread_local OpMemory* here = nullptr;
  return here;
}

// What the op that runs takes, in one session (rule 8). Python writes the first two cells around every op and reads the
// others; nobody else does while the op runs.
class OpMemory {
 public:
  enum Cell { RESIDENT, STATE, ALLOWED, LOCAL, ABOVE, MOST, PEAK, BEYOND, UNWATCHED, HELD, CELLS };
  enum State { OWN = -1, IDLE, BEGINS, RUNS, WENT_BEYOND, REFUSED };
  enum Room { NONE, COUNTED, OF_ENGINE };
  using AskForRoom = int (*)(std::size_t);

  OpMemory(const char* directory, AskForRoom ask) : ask_(ask), directory_(directory), share_(take_share()) {}

  std::int64_t* cells() { return cells_; }

  // Whether an op runs that takes this; it begins with its first block.
  bool runs() {
    if (cells_[STATE] == BEGINS) {
      cells_[STATE] = RUNS;
      cells_[LOCAL] = cells_[ABOVE] = cells_[MOST] = 0;
      op_ = new_op();
    }
    return cells_[STATE] >= RUNS;
  }
  std::uint64_t op() const { return op_; }

  // Whether a watched step is between two ops, and it is not the engine that takes something.
  bool outside_of_ops() const { return cells_[STATE] == IDLE && cells_[UNWATCHED] == 0 && ask_ != nullptr; }
  // Whoever watches takes it into the account, after making room. Python runs; no lock is held.
  Room ask_for_room(std::size_t nbytes) {
    cells_[STATE] = OWN;
    const int room = ask_(nbytes);
    cells_[STATE] = IDLE;
    return static_cast<Room>(room);
  }
  void holds_outside(std::size_t nbytes) {
    __atomic_fetch_add(&cells_[HELD], static_cast<std::int64_t>(nbytes), __ATOMIC_RELAXED);
  }
  // Memory of the file for what has no room. It counts in no account, and in no op.
  void* lend_outside(std::size_t nbytes, bool told) {
    std::lock_guard<std::mutex> guard(mutex());
    void* memory = nullptr;
    if (const int error = place(nbytes, told, 0, memory); error != 0) {
      refuse(no_room(std::to_string(nbytes) + " bytes more outside of any op", error));
    }
    lent_outside_ += static_cast<std::int64_t>(nbytes);
    cells_[BEYOND] = std::max(cells_[BEYOND], lent_outside_);
    return memory;
  }

  // Whether a step runs that nobody watches (rule 9), and that is as one op.
  bool unwatched() const { return cells_[UNWATCHED] != 0; }
  void begin_unwatched() {
    op_ = new_op();
    cells_[LOCAL] = cells_[ABOVE] = cells_[MOST] = cells_[BEYOND] = 0;
    cells_[STATE] = IDLE;
    cells_[UNWATCHED] = 1;
    cells_[PEAK] = counted();
  }
  void begin_watched() { cells_[UNWATCHED] = 0; }
  std::int64_t counted() const {
    return cells_[RESIDENT] + __atomic_load_n(&cells_[HELD], __ATOMIC_RELAXED) +
           __atomic_load_n(&share_->held, __ATOMIC_RELAXED);
  }
  bool fits_unwatched(std::size_t nbytes) const {
    return counted() + static_cast<std::int64_t>(nbytes) <= cells_[ALLOWED];
  }
  void holds(std::size_t nbytes) {
    __atomic_fetch_add(&cells_[HELD], static_cast<std::int64_t>(nbytes), __ATOMIC_RELAXED);
    cells_[PEAK] = std::max(cells_[PEAK], counted());
  }
  void gone(std::size_t nbytes) {
    __atomic_fetch_sub(&cells_[HELD], static_cast<std::int64_t>(nbytes), __ATOMIC_RELAXED);
  }
  // Whether there is room for what malloc gave.
  bool holds_small(void* memory) {
    const std::size_t size = ::malloc_usable_size(memory);
    if (!fits_unwatched(size)) return false;
    __atomic_fetch_add(&share_->held, static_cast<std::int64_t>(size), __ATOMIC_RELAXED);
    cells_[PEAK] = std::max(cells_[PEAK], counted());
    return true;
  }
  c10::DeleterFnPtr small_deleter() const { return share_->deleter; }
  std::int64_t* small() { return &share_->held; }

  bool fits(std::size_t nbytes) const {
    return cells_[RESIDENT] + cells_[LOCAL] + static_cast<std::int64_t>(nbytes) <= cells_[ALLOWED];
  }
  void took(std::size_t nbytes) {
    cells_[LOCAL] += static_cast<std::int64_t>(nbytes);
    cells_[MOST] = std::max(cells_[MOST], cells_[LOCAL] + cells_[ABOVE]);
    cells_[PEAK] = std::max(cells_[PEAK], cells_[RESIDENT] + cells_[LOCAL]);
  }
  void gave(const Block& block) {
    if (cells_[STATE] >= RUNS && block.op == op_) cells_[LOCAL] -= static_cast<std::int64_t>(block.born.nbytes);
  }

  // A step begins whose trace is guarded (rule 10): what it was lent at most is in BEYOND.
  void begin_lending() {
    std::lock_guard<std::mutex> guard(mutex());
    op_ = new_op();
    cells_[ABOVE] = cells_[BEYOND] = 0;
    cells_[STATE] = IDLE;
    lending_ = true;
  }
  void end_lending() { lending_ = false; }
  // What a guarded trace has no room for, or null.
  void* lend(std::size_t nbytes, bool told) {
    std::lock_guard<std::mutex> guard(mutex());
    void* memory = nullptr;
    if (place(nbytes, told, op_, memory) != 0) return nullptr;
    cells_[ABOVE] += static_cast<std::int64_t>(nbytes);
    cells_[BEYOND] = std::max(cells_[BEYOND], cells_[ABOVE]);
    return memory;
  }

  // Memory of the file. It counts in what the op needs, and in no account.
  void* beyond(std::size_t nbytes, bool told) {
    void* memory = nullptr;
    int error = 0;
    {
      std::lock_guard<std::mutex> guard(mutex());
      error = place(nbytes, told, op_, memory);
    }
    if (error != 0) {
      cells_[STATE] = REFUSED;
      cells_[MOST] = std::max(cells_[MOST], cells_[LOCAL] + cells_[ABOVE] + static_cast<std::int64_t>(nbytes));
      const std::int64_t taken = counted() + cells_[ABOVE] + static_cast<std::int64_t>(nbytes);
      refuse(unwatched() ? no_room(std::to_string(taken) + " bytes at once", error) : std::strerror(error));
    }
    if (cells_[STATE] != REFUSED) cells_[STATE] = WENT_BEYOND;
    cells_[ABOVE] += static_cast<std::int64_t>(nbytes);
    cells_[MOST] = std::max(cells_[MOST], cells_[LOCAL] + cells_[ABOVE]);
    cells_[BEYOND] = std::max(cells_[BEYOND], cells_[ABOVE]);
    return memory;
  }

  // What it was in such a file, which has it back now; of size 0 for what was in none.
  static Block returned(void* memory) {
    if (mapped_beyond() == 0) return {};
    std::lock_guard<std::mutex> guard(mutex());
    const auto found = all().find(memory);
    if (found == all().end()) return {};
    const Part part = found->second;
    all().erase(found);
    --mapped_beyond();
    OpMemory& owner = *part.mapping->owner;
    if (--part.mapping->alive == 0 && part.mapping == owner.chunk_ && !part.mapping->parted) {
      part.mapping->used = 0;  // the next small one lies here
    } else {
      if (part.mapping == owner.chunk_ && part.mapping->alive == 0) owner.chunk_ = nullptr;
      owner.let_go_of(part.mapping);
    }
    owner.close_unused();
    if (part.block.op == 0) owner.lent_outside_ -= static_cast<std::int64_t>(part.block.born.nbytes);
    const bool counts = owner.lending_ || (op_memory() == &owner && owner.cells_[STATE] >= RUNS);
    if (counts && part.block.op == owner.op_) {
      owner.cells_[ABOVE] -= static_cast<std::int64_t>(part.block.born.nbytes);
    }
    return part.block;
  }
  // Whether it lies in this session's file; without an address, whether anything does.
  bool lends(void* memory) {
    if (mapped_beyond() == 0) return false;
    std::lock_guard<std::mutex> guard(mutex());
    if (memory == nullptr) return free_.bytes() + lost_ != end_;
    const auto found = all().find(memory);
    return found != all().end() && found->second.mapping->owner == this;
  }
  static bool has(void* memory) {
    if (mapped_beyond() == 0) return false;
    std::lock_guard<std::mutex> guard(mutex());
    return all().count(memory) != 0;
  }

  // Whether the account does not have this, as an unwatched step made it; what lies in the file included.
  bool knows(c10::StorageImpl* storage) {
    const c10::DataPtr& bytes = storage->_mutable_data_ptr_no_checks();
    return arena().made_by(bytes.get(), this) || bytes.get_deleter() == small_deleter() || has(bytes.get());
  }
  // The account has it from now on: bytes that do not count besides any more.
  std::size_t adopt(c10::StorageImpl* storage) {
    c10::DataPtr& bytes = storage->_mutable_data_ptr_no_checks();
    if (const std::size_t nbytes = arena().disown(bytes.get(), this); nbytes != 0) {
      gone(nbytes);
      return nbytes;
    }
    if (!bytes.compare_exchange_deleter(small_deleter(), usual_deleter())) return 0;
    return gone_small(*share_, bytes.get());
  }

  // The session is over; what is left of the file's memory is readable until it is freed.
  void close() {
    std::lock_guard<std::mutex> guard(mutex());
    if (!closed_) --share_->sessions;
    closed_ = true;
    ask_ = nullptr;
    cells_[STATE] = IDLE;  // nobody may have ended its step
    cells_[UNWATCHED] = 0;
    let_go_of(std::exchange(chunk_, nullptr));
    close_unused();
  }

  // Before this process forks (rule 7).
  static void part() {
    for (auto& [memory, part] : all()) {
      Mapping& mapping = *part.mapping;
      if (mapping.parted) continue;
      const auto offset = static_cast<off_t>(mapping.offset);
      mapping.parted = ::mmap(mapping.base, mapping.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                              mapping.owner->file_, offset) != MAP_FAILED;
    }
  }

  static std::mutex& mutex() {
    static std::mutex* const only = new std::mutex;  // rule 5
    return *only;
  }

 private:
  struct Mapping {
    OpMemory* owner;
    char* base;
    std::size_t offset, size;
    std::size_t used, alive;  // bytes from its beginning, and blocks
    bool parted;              // whether a child has this place of the file too
  };
  struct Part {
    Mapping* mapping;
    Block block;
  };
  static std::unordered_map<void*, Part>& all() {
    static auto* const only = new std::unordered_map<void*, Part>;  // rule 5
    return *only;
  }
  static std::atomic<std::size_t>& mapped_beyond() {  // read before the lock is taken
    static std::atomic<std::size_t> number{0};
    return number;
  }

  static std::uint64_t new_op() {
    static std::atomic<std::uint64_t> ops{0};
    return ++ops;
  }
  int open() {
    if (file_ >= 0) return 0;
    std::string path = directory_ + "/spillway-XXXXXX";
    file_ = ::mkostemp(path.data(), O_CLOEXEC);
    if (file_ < 0) return errno;
    ::unlink(path.c_str());
    return 0;
  }
  void punch(std::size_t offset, std::size_t size) {
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(size));
  }
  [[noreturn]] static void refuse(const std::string& reason) {
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, reason);
  }
  std::string no_room(const std::string& taken, int error) const {
    return "This step takes " + taken + ", its budget is " + std::to_string(cells_[ALLOWED]) +
           ", and there is no room for the rest in the spill directory " + directory_ + " (" + std::strerror(error) +
           "): raise the budget, or free some space there or choose another with SpillOptions(directory=...) or "
           "--spill-directory.";
  }
  // A block of the file, born in this op: 0, or the system's error number.
  int place(std::size_t nbytes, bool told, std::uint64_t op, void*& memory) {
    // Of what is small there are many in one mapping: the system allows only so many of these.
    const std::size_t size = nbytes < SMALL ? (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : pages(nbytes);
    Mapping* mapping = nullptr;
    int error = 0;
    if (nbytes >= SMALL) {
      error = map(size, mapping);
    } else if (chunk_ == nullptr || chunk_->parted || chunk_->size - chunk_->used < size) {
      error = map(CHUNK, mapping);
      if (error == 0) let_go_of(std::exchange(chunk_, mapping));
    } else {
      mapping = chunk_;
    }
    if (error != 0) return error;
    memory = mapping->base + mapping->used;
    mapping->used += size;
    ++mapping->alive;
    all()[memory] = {mapping, {size, told, Born{nbytes, 0, 0}, op, nullptr}};
    ++mapped_beyond();
    return 0;
  }
  // A part of the file: 0, or the system's error number.
  int map(std::size_t size, Mapping*& mapping) {
    if (free_.empty() || free_.best(size).second < size) {
      free_.add(end_, size);
      end_ += size;
    }
    const std::size_t offset = free_.best(size).first;
    int error = open();
    if (error != 0) return error;
    do {
      error = ::posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(size));
    } while (error == EINTR);
    void* mapped = MAP_FAILED;
    if (error == 0) {
      mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(offset));
      if (mapped == MAP_FAILED) error = errno;
    }
    if (error != 0) {
      punch(offset, size);  // what it was given until there was no more
      return error;
    }
    free_.take(offset, size);
    mapping = new Mapping{this, static_cast<char*>(mapped), offset, size, 0, 0, false};
    return 0;
  }
  // The file has it back, if no block lies there.
  void let_go_of(Mapping* mapping) {
    if (mapping == nullptr || mapping->alive != 0) return;
    ::munmap(mapping->base, mapping->size);
    if (mapping->parted) {
      lost_ += mapping->size;
    } else {
      if (process_ == ::getpid()) punch(mapping->offset, mapping->size);
      free_.add(mapping->offset, mapping->size);
    }
    delete mapping;
  }
  void close_unused() {
    if (!closed_ || file_ < 0 || free_.bytes() + lost_ != end_) return;
    ::close(file_);
    file_ = -1;
  }

  // Of what is small, for the sessions that are open: what they hold, and how it is freed.
  struct Share {
    c10::DeleterFnPtr deleter;
    std::int64_t held = 0;
    std::size_t sessions = 0;
  };
  template <std::size_t... PLACES>
  static std::array<Share, SHARES>& shares(std::index_sequence<PLACES...>) {
    static auto* const all = new std::array<Share, SHARES>{Share{&free_small<PLACES>}...};  // rule 5
    return *all;
  }
  static std::array<Share, SHARES>& shares() { return shares(std::make_index_sequence<SHARES>{}); }
  static Share* take_share() {
    std::lock_guard<std::mutex> guard(mutex());
    Share* const best = std::min_element(shares().begin(), shares().end(), [](const Share& one, const Share& other) {
      return std::pair(one.sessions, one.held) < std::pair(other.sessions, other.held);
    });
    ++best->sessions;
    return best;
  }
  static std::size_t gone_small(Share& share, void* memory) {
    const std::size_t size = ::malloc_usable_size(memory);
    __atomic_fetch_sub(&share.held, static_cast<std::int64_t>(size), __ATOMIC_RELAXED);
    return size;
  }
  template <std::size_t PLACE>
  static void free_small(void* memory) {
    gone_small(shares()[PLACE], memory);
    usual_deleter()(memory);
  }
  static c10::DeleterFnPtr usual_deleter();

  std::int64_t cells_[CELLS] = {};
  AskForRoom ask_;
  const std::string directory_;
  Share* const share_;
  const pid_t process_ = ::getpid();
  std::uint64_t op_ = 0;
  std::int64_t lent_outside_ = 0;  // of ops
  int file_ = -1;
  bool closed_ = false, lending_ = false;
  Extents free_;  // of the file, by offset
  std::size_t end_ = 0, lost_ = 0;
  Mapping* chunk_ = nullptr;  // for what is small
};

std::size_t machine_memory() {
  static const long pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
  return static_cast<std::size_t>(pages) * static_cast<std::size_t>(size);
}

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return c10::GetDefaultCPUAllocator()->allocate(0);
    OpMemory* const step = op_memory();
    OpMemory* const unwatched = step != nullptr && step->unwatched() ? step : nullptr;
    const bool hopeless = nbytes > machine_memory(), told = c10::memoryProfilingEnabled();
    OpMemory* const lender = hopeless ? nullptr : arena().lender(nbytes);
    void* lent = lender != nullptr ? lender->lend(nbytes, told) : nullptr;
    const bool elsewhere = nbytes < SMALL || hopeless;
    bool outside = step != nullptr && lent == nullptr && !elsewhere && step->outside_of_ops();
    if (outside) {
      const OpMemory::Room room = step->ask_for_room(nbytes);
      if (room == OpMemory::NONE) lent = step->lend_outside(nbytes, told);
      outside = room != OpMemory::OF_ENGINE;
    }
    if (lent != nullptr) {
      report(lent, static_cast<std::int64_t>(nbytes));
      return {lent, lent, &free, c10::Device(c10::DeviceType::CPU)};
    }
    void* memory = elsewhere              ? nullptr
                   : unwatched != nullptr ? take(nbytes, *unwatched)
                   : outside              ? take_outside(nbytes, *step)
                                          : take(nbytes);
    if (memory == nullptr) {  // rule 4
      c10::DataPtr given = c10::GetDefaultCPUAllocator()->allocate(nbytes);
      if (unwatched == nullptr || unwatched->holds_small(given.get())) {
        arena().born_outside(given.get(), nbytes);
        memory = given.release_context();
        return {memory, memory, unwatched != nullptr ? unwatched->small_deleter() : &free, c10::Device(c10::DeviceType::CPU)};
      }
      given.clear();
      memory = unwatched->beyond(nbytes, c10::memoryProfilingEnabled());
    }
    report(memory, static_cast<std::int64_t>(nbytes));
    return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }

  static void free(void* memory) {
    Block block = arena().give(memory);
    if (block.size == 0) {
      block = OpMemory::returned(memory);
      if (block.size == 0) {
        arena().died_outside(memory);
        return c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
      }
    } else if (block.unwatched != nullptr) {
      block.unwatched->gone(block.born.nbytes);
    } else if (OpMemory* const op = op_memory()) {
      op->gave(block);
    }
    if (block.told) report(memory, -static_cast<std::int64_t>(block.born.nbytes));
  }

 private:
  // Not by torch's own table of sizes, which takes a block for one that lay at its address when somebody profiled.
  static void report(void* memory, std::int64_t nbytes) {
    if (!c10::memoryProfilingEnabled()) return;
    c10::reportMemoryUsageToProfiler(memory, nbytes, arena().counts().live, 0, c10::Device(c10::DeviceType::CPU));
  }
  static void* take(std::size_t nbytes) {
    OpMemory* const op = op_memory();
    const bool counts = op != nullptr && op->runs(), told = c10::memoryProfilingEnabled();
    if (counts && !op->fits(nbytes)) return op->beyond(nbytes, told);
    void* const memory = arena().take(nbytes, told, counts ? op->op() : 0, nullptr);
    if (counts && memory != nullptr) op->took(nbytes);
    return memory;
  }
  static void* take_outside(std::size_t nbytes, OpMemory& step) {
    void* const memory = arena().take(nbytes, c10::memoryProfilingEnabled(), 0, &step);
    if (memory != nullptr) step.holds_outside(nbytes);
    return memory;
  }
  static void* take(std::size_t nbytes, OpMemory& unwatched) {
    const bool told = c10::memoryProfilingEnabled();
    if (!unwatched.fits_unwatched(nbytes)) return unwatched.beyond(nbytes, told);
    void* const memory = arena().take(nbytes, told, unwatched.op(), &unwatched);
    if (memory != nullptr) unwatched.holds(nbytes);
    return memory;
  }
};

c10::DeleterFnPtr OpMemory::usual_deleter() { return &ArenaAllocator::free; }

void lock() {
  OpMemory::mutex().lock();
  arena().mutex().lock();
  OpMemory::part();
}
void unlock() {
  arena().mutex().unlock();
  OpMemory::mutex().unlock();
}
void unlock_in_child() {
  op_memory() = nullptr;  // the file is the parent's, and so is the step
  arena().unguard();
  unlock();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int spillway_arena_reserve(std::size_t span) {
  const int error = arena().reserve(span);
  static const int forks = ::pthread_atfork(&lock, &unlock, &unlock_in_child);  // rule 7
  return error != 0 ? error : forks;
}

// For `torch.UntypedStorage(nbytes, allocator=...)`, which does not ask torch's current allocator.
c10::Allocator* spillway_arena_allocator() {
  static ArenaAllocator* const only = new ArenaAllocator;  // rule 5
  return only;
}

void spillway_arena_serve(int on) {
  c10::SetCPUAllocator(on != 0 ? spillway_arena_allocator() : c10::GetDefaultCPUAllocator(), PRIORITY);
}

void spillway_arena_trim(std::size_t keep) { arena().trim(keep); }
void spillway_arena_counts(Counts* counts) { *counts = arena().counts(); }
void spillway_arena_reset_peaks() { arena().reset_peaks(); }
int spillway_arena_trace(const std::uintptr_t* addresses, const std::size_t* sizes, std::size_t count) {
  return arena().trace(addresses, sizes, count);
}
void spillway_arena_forget(int place, std::uintptr_t address) { arena().forget(place, address); }
void spillway_arena_since(int place, std::int64_t* held_and_peak) {
  std::tie(held_and_peak[0], held_and_peak[1]) = arena().since(place);
}
void spillway_arena_end_trace(int place) { arena().end_trace(place); }
void spillway_arena_guard(int place, std::int64_t most, OpMemory* lender) {
  lender->begin_lending();
  arena().guard(place, most, lender);
}
int spillway_arena_owns(const void* address) { return arena().owns(address) ? 1 : 0; }
// Whether it is as `torch.load` leaves it: memory of torch's own, which no allocator is named for, of a fixed size.
int spillway_arena_is_loaded(const c10::StorageImpl* storage) {
  const c10::DeleterFnPtr deleter = storage->data_ptr().get_deleter();
  return !storage->resizable() && storage->allocator() == nullptr &&
         (deleter == c10::GetDefaultCPUAllocator()->raw_deleter() || deleter == spillway_arena_allocator()->raw_deleter());
}
void spillway_arena_make_resizable(c10::StorageImpl* storage) {
  storage->set_allocator(c10::GetCPUAllocator());
  storage->set_resizable(true);
}

OpMemory* spillway_op_memory(const char* directory, OpMemory::AskForRoom ask) {
  return new OpMemory(directory, ask);  // rule 5
}
std::int64_t* spillway_op_memory_cells(OpMemory* memory) { return memory->cells(); }
void spillway_op_memory_here(OpMemory* memory, int unwatched) {
  op_memory() = memory;
  if (memory == nullptr) return;
  unwatched != 0 ? memory->begin_unwatched() : memory->begin_watched();
}
std::int64_t* spillway_op_memory_small(OpMemory* memory) { return memory->small(); }
void spillway_op_memory_end_lending(OpMemory* memory) { memory->end_lending(); }
void spillway_op_memory_close(OpMemory* memory) { memory->close(); }
int spillway_op_memory_knows(OpMemory* memory, c10::StorageImpl* storage) { return memory->knows(storage) ? 1 : 0; }
std::size_t spillway_op_memory_adopt(OpMemory* memory, c10::StorageImpl* const* storages, std::size_t count) {
  std::size_t nbytes = 0;
  for (std::size_t one = 0; one < count; ++one) nbytes += memory->adopt(storages[one]);
  return nbytes;
}
int spillway_op_memory_lends(OpMemory* memory, void* address) { return memory->lends(address) ? 1 : 0; }
int spillway_op_memory_has(void* address) { return OpMemory::has(address) ? 1 : 0; }
}
#pragma GCC visibility pop
