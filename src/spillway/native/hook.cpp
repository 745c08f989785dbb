// What the handlers in Python (`engines/tensors/handlers.py`) do for the ops that make up nearly all of a step, without
// Python's arguments, tensors and calls. Every op of a watched step arrives here first; whatever is unusual about it
// goes on to those handlers, as if nobody had looked.
//
// NOTE [One set of books]. There are no records of its own here. It reads and writes the same Python objects (storages,
// values, the ledger, the budget) in the places where their classes keep their `__slots__`, so that whoever looks at
// them in Python sees no difference, and an op that goes the long way meets the state that it would have met.
//
// NOTE [Rules]
//  1. Before the op runs nothing changes but when a storage was last used: it may still go the long way.
//  2. Everything here happens with the GIL and in the watcher's turn; the op itself runs without the GIL.
//  3. What stands in Python under a condition stands here under the same one. A bound is Python's own, asked once for
//     each kind of arguments; settings are Python's own, asked again when any of them has changed.

#include <Python.h>
#include <structmember.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cfloat>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// Of torch's Python library, whose headers take as long to compile as all the others.
TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
TORCH_PYTHON_API PyObject* THPStorage_Wrap(c10::Storage storage);
namespace torch::jit {
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
}

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

constexpr DispatchKey ARRIVES = DispatchKey::Fake;
constexpr DispatchKey LONG_WAY = DispatchKey::TESTING_ONLY_GenericWrapper;  // where the handlers in Python stand
constexpr std::int64_t LARGE = std::int64_t{256} << 10;                     // as in `memory/records.py`
constexpr std::int64_t SMALLEST_MOVABLE = 4096;                             // as in `memory/ledger.py`
constexpr std::int64_t SMALL = 16384;  // elements that an op goes through in some microseconds
constexpr std::int64_t UNBOUNDED = -1;
constexpr std::size_t HOOKS = 64;  // at a time; whoever comes later goes the long way

enum State { IDLE, BEGINS, RUNS, WENT_BEYOND, REFUSED };      // as in arena.cpp, of which it needs these
enum Cell { RESIDENT, STATE, UNWATCHED = 8 };                 // as there
enum Absent { HERE, DROPPED, AWAY, GONE };                    // as in `memory/records.py`
enum Moment { BEFORE = 1, AFTER = 2 };                        // as in `engines/tensors/followed.py`
using Knows = int(void* memory, c10::StorageImpl* storage);   // `spillway_op_memory_knows` there
enum class Kind { VIEW, READS, CREATES, WRITES, NORMALISES };

// Around what Python calls.
#define BEGIN_CALL HANDLE_TH_ERRORS try {
#define END_CALL                      \
  }                                   \
  catch (const std::bad_alloc&) {     \
    return PyErr_NoMemory();          \
  }                                   \
  END_HANDLE_TH_ERRORS

[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw error;
}

// An owned reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {
    if (owned == nullptr) raise();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* borrowed) { return Ref(Py_NewRef(borrowed)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

Ref number(std::int64_t value) { return Ref(PyLong_FromLongLong(value)); }

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// While an op runs others may have the GIL, but where giving it up and taking it again takes as long as the op.
class WhileOpRuns {
 public:
  explicit WhileOpRuns(bool small) : state_(small ? nullptr : PyEval_SaveThread()) {}
  ~WhileOpRuns() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WhileOpRuns(const WhileOpRuns&) = delete;
  WhileOpRuns& operator=(const WhileOpRuns&) = delete;

 private:
  PyThreadState* state_;
};

// Where the objects of a class keep one of their `__slots__`.
class Slot {
 public:
  Slot() = default;
  Slot(PyObject* type, const char* name) {
    const Ref found(PyObject_GetAttrString(type, name));
    if (Py_TYPE(found.get()) != &PyMemberDescr_Type) {
      PyErr_Format(PyExc_TypeError, "%s is no slot of %R", name, type);
      raise();
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
  }

  PyObject* of(PyObject* owner) const { return at(owner); }
  std::int64_t number_of(PyObject* owner) const { return PyLong_AsLongLong(at(owner)); }
  void put(PyObject* owner, PyObject* borrowed) const {
    PyObject* const before = std::exchange(at(owner), Py_NewRef(borrowed));
    Py_XDECREF(before);
  }
  void put(PyObject* owner, std::int64_t value) const { put(owner, number(value).get()); }

 private:
  PyObject*& at(PyObject* owner) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

Ref made(PyObject* type, Py_ssize_t items = 0) {
  auto* const kind = reinterpret_cast<PyTypeObject*>(type);
  return Ref(kind->tp_alloc(kind, items));
}

// ----------------------------------------------------------------------------------------------- a call, written down

struct Geometry {
  c10::SmallVector<std::int64_t, 8> sizes_and_strides;
  std::int64_t offset;
  c10::ScalarType dtype;

  explicit Geometry(const at::Tensor& tensor) : offset(tensor.storage_offset()), dtype(tensor.scalar_type()) {
    sizes_and_strides.append(tensor.sizes().begin(), tensor.sizes().end());
    sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
  }
  at::Tensor over(c10::Storage storage) const {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU),
                                                           c10::scalarTypeToTypeMeta(dtype));
    const auto both = c10::IntArrayRef(sizes_and_strides);
    const std::size_t dims = both.size() / 2;
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(both.slice(0, dims), both.slice(dims), offset);
    return tensor;
  }
  at::Tensor zeros() const {
    const auto both = c10::IntArrayRef(sizes_and_strides);
    return at::zeros(both.slice(0, both.size() / 2), at::TensorOptions(dtype));
  }
};

struct Recorded {
  c10::OperatorHandle op;
  Stack args;  // with a hole for each tensor
  c10::SmallVector<std::pair<std::size_t, Geometry>, 3> operands;
  c10::SmallVector<std::pair<std::size_t, Geometry>, 2> scratch;  // a replay fills these with zeros
};

// Those of recipes that are gone: a step makes thousands, and whatever they own is there for the next.
constexpr std::size_t SPARE = 8192;
std::vector<std::unique_ptr<Recorded>>& spare() {
  static auto* const all = new std::vector<std::unique_ptr<Recorded>>;
  return *all;
}

struct Payload {  // what a recipe keeps of a call: `calls.Recorded` in Python
  PyObject_HEAD
  PyObject* environment;
  PyObject* outputs;
  Recorded* recorded;
};

void payload_dealloc(PyObject* self) {
  auto* const payload = reinterpret_cast<Payload*>(self);
  Py_CLEAR(payload->environment);
  Py_CLEAR(payload->outputs);
  std::unique_ptr<Recorded> recorded(std::exchange(payload->recorded, nullptr));
  if (recorded != nullptr && spare().size() < SPARE) {
    recorded->args.clear(), recorded->operands.clear(), recorded->scratch.clear();
    spare().push_back(std::move(recorded));
  }
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* payload_again(PyObject* self, PyObject* storages) {
  BEGIN_CALL
  const Recorded& recorded = *reinterpret_cast<Payload*>(self)->recorded;
  Stack stack = recorded.args;
  Py_ssize_t next = 0;
  for (const auto& [place, geometry] : recorded.operands) {
    const Ref storage(PySequence_GetItem(storages, next++));
    const Ref address(PyObject_GetAttrString(storage.get(), "_cdata"));
    auto* const impl = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address.get()));
    if (impl == nullptr) raise();
    stack[place] = geometry.over(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl)));
  }
  {
    const WithoutGil without;
    for (const auto& [place, geometry] : recorded.scratch) stack[place] = geometry.zeros();
    recorded.op.callBoxed(stack);
  }
  Ref results(PyTuple_New(static_cast<Py_ssize_t>(stack.size())));
  for (std::size_t place = 0; place < stack.size(); ++place) {
    PyTuple_SET_ITEM(results.get(), static_cast<Py_ssize_t>(place),
                     torch::jit::toPyObject(std::move(stack[place])).release().ptr());
  }
  return results.release();
  END_CALL
}

PyMethodDef payload_methods[] = {
    {"again", &payload_again, METH_O, "Make the call on tensors over these storages; a tuple of its results."},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef payload_members[] = {
    {"environment", T_OBJECT, offsetof(Payload, environment), READONLY, "What the op reads beside its arguments."},
    {"outputs", T_OBJECT, offsetof(Payload, outputs), READONLY, "Results with a storage of their own, by position."},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot payload_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&payload_dealloc)},
                               {Py_tp_methods, payload_methods},
                               {Py_tp_members, payload_members},
                               {0, nullptr}};
PyType_Spec payload_spec = {"spillway_hook.Payload", sizeof(Payload), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, payload_slots};
PyObject* payload_type = nullptr;

Ref payload_of(const c10::OperatorHandle& op, PyObject* environment, PyObject* outputs) {
  Ref self = made(payload_type);
  auto* const payload = reinterpret_cast<Payload*>(self.get());
  payload->environment = Py_NewRef(environment);
  payload->outputs = Py_NewRef(outputs);
  if (spare().empty()) {
    payload->recorded = new Recorded{op, {}, {}, {}};
  } else {
    payload->recorded = spare().back().release();
    spare().pop_back();
    payload->recorded->op = op;
  }
  return self;
}

// ------------------------------------------------------------------------------------------------ what bounds look at

// The arguments of a call as a bound sees them.
class Arguments {
 public:
  c10::SmallVector<std::int64_t, 32> words;

  // A number in Python, of which bounds read nothing but whether it is complex.
  void wrapped(const at::Tensor& number) { words.push_back(number.is_complex() ? COMPLEX : 7); }
  void tensor(const at::Tensor& tensor) {
    words.push_back(0x100 + static_cast<std::int64_t>(tensor.scalar_type()));
    list(tensor.sizes());
  }
  // Whether it is of a kind that holds no tensor and is known here.
  bool other(const IValue& value) {
    if (value.isNone()) {
      words.push_back(1);
    } else if (value.isInt()) {
      words.append({2, value.toInt()});
    } else if (value.isBool()) {
      words.append({3, value.toBool() ? 1 : 0});
    } else if (value.isDouble() || value.isString() || value.isDevice()) {
      words.push_back(4);  // no bound reads it
    } else if (value.isComplexDouble()) {
      words.push_back(COMPLEX);
    } else if (value.isIntList()) {
      words.push_back(5);
      const auto list = value.toIntList();
      words.push_back(static_cast<std::int64_t>(list.size()));
      for (const std::int64_t one : list) words.push_back(one);
    } else if (value.isBoolList() || value.isDoubleList()) {
      words.push_back(6);
    } else {
      return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t COMPLEX = 8;
  void list(c10::IntArrayRef numbers) {
    words.push_back(static_cast<std::int64_t>(numbers.size()));
    words.append(numbers.begin(), numbers.end());
  }
};

struct Hash {
  std::size_t operator()(const c10::SmallVector<std::int64_t, 32>& words) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15u ^ words.size();
    for (const std::int64_t word : words) {
      hash ^= static_cast<std::uint64_t>(word);
      hash *= 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

constexpr std::size_t MOST_NEEDS = 4096;  // kinds of arguments that are remembered of one op

// --------------------------------------------------------------------------------------------------------- settings

// Everything that `environment.OpEnvironment` has, as numbers: as long as none has changed, neither has that.
using Fingerprint = std::array<std::int64_t, 16>;

Fingerprint fingerprint() {
  const at::Context& context = at::globalContext();
  static volatile double smallest = DBL_MIN, half = 0.5;
  const bool casts = !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutocastCPU);
  using at::Float32Backend;
  using at::Float32Op;
  const auto precision = [&](Float32Op op) {
    return static_cast<std::int64_t>(context.float32Precision(Float32Backend::MKLDNN, op));
  };
  const std::array<std::int64_t, 3> precisions = {precision(Float32Op::MATMUL), precision(Float32Op::CONV),
                                                  precision(Float32Op::RNN)};
  // The older way to ask raises where the newer one, whose answers these are, was used; and slowly.
  thread_local std::optional<std::array<std::int64_t, 3>> raised_under;
  std::int64_t products = -1;
  if (raised_under != precisions) {
    raised_under.reset();
    try {
      products = static_cast<std::int64_t>(context.float32MatmulPrecision());
    } catch (const c10::Error&) {
      raised_under = precisions;
    }
  }
  return {at::get_num_threads(),
          static_cast<std::int64_t>(c10::get_default_dtype_as_scalartype()),
          context.deterministicAlgorithms(),
          context.deterministicAlgorithmsWarnOnly(),
          context.deterministicFillUninitializedMemory(),
          context.userEnabledMkldnn(),
          context.deterministicMkldnn(),
          context.userEnabledNNPACK(),
          context.allowFP16ReductionCPU(),
          smallest * half == 0.0,
          c10::GradMode::is_enabled(),
          casts ? 1 + static_cast<std::int64_t>(at::autocast::get_autocast_dtype(c10::DeviceType::CPU)) : 0,
          products,
          precisions[0],
          precisions[1],
          precisions[2]};
}

struct Settings {
  Ref now;  // asks Python
  Ref environment;
  Fingerprint seen{};
};

// ----------------------------------------------------------------------------------------------------------- the hook

// What is known of one op in one engine.
struct Plan {
  Kind kind;
  bool recorded;  // whether recipes are written of it, where any are
  bool resized;   // whether what it writes may have grown out of sight
  bool seeded;
  bool small;     // whether it takes next to no time on little: it goes through its elements once
  std::int64_t safety;
  std::int64_t training;                     // where `training` stands, of what normalises; -1 where it always trains
  c10::SmallVector<std::size_t, 2> scratch;  // what that writes, and a replay does without
  std::size_t settings;
  Ref name, exactness, bound, beyond, refused;
  std::unordered_map<c10::SmallVector<std::int64_t, 32>, std::int64_t, Hash> needs;
};

struct Operand {
  std::size_t place;
  Ref storage, value;  // the session may end meanwhile
};
using Operands = c10::SmallVector<Operand, 6>;

class Hook;

// Hears of the deaths of storages that were taken into account by a hook. It keeps neither that nor its engine.
struct Deaths {
  PyObject_HEAD
  Hook* hook;  // null once it is gone
  Slot record, handle, value;
};
PyObject* deaths_type = nullptr;
PyObject* deaths_heard(PyObject* self, PyObject* watch);
PyMethodDef deaths_method = {"died", &deaths_heard, METH_O, "A storage died."};

class Hook {
 public:
  Hook(PyObject* self, PyObject* known);
  ~Hook();
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  static Hook* here();
  void teach(std::size_t op, std::shared_ptr<Plan> plan) {
    if (plans_.size() <= op) plans_.resize(op + 1);
    plans_[op] = std::move(plan);
  }
  void forget() { plans_.clear(); }
  // `plan` is None or what is asked around some ops of the step: which, what each op creates, on which clock the first
  // comes, and who.
  void arm(bool recording, PyObject* plan) {
    moments_.clear(), creates_.clear();
    if (plan != Py_None) {
      PyObject* const moments = PyTuple_GET_ITEM(plan, 0);
      moments_.assign(PyBytes_AS_STRING(moments), static_cast<std::size_t>(PyBytes_GET_SIZE(moments)));
      PyObject* const creates = PyTuple_GET_ITEM(plan, 1);
      creates_.resize(static_cast<std::size_t>(PyBytes_GET_SIZE(creates)) / sizeof(std::int64_t));
      std::copy_n(PyBytes_AS_STRING(creates), PyBytes_GET_SIZE(creates), reinterpret_cast<char*>(creates_.data()));
      first_op_ = PyLong_AsLongLong(PyTuple_GET_ITEM(plan, 2));
      followed_ = Ref::to(PyTuple_GET_ITEM(plan, 3));
      before_op_ = Ref(PyObject_GetAttrString(followed_.get(), "before_op"));
      after_op_ = Ref(PyObject_GetAttrString(followed_.get(), "after_op"));
      newest_ = {reinterpret_cast<PyObject*>(Py_TYPE(followed_.get())), "newest"};
    }
    const Ref turn(PyObject_GetAttrString(watcher_.get(), "turn"));  // another one in a forked child
    acquire_ = Ref(PyObject_GetAttrString(turn.get(), "acquire"));
    release_ = Ref(PyObject_GetAttrString(turn.get(), "release"));
    recording_ = recording;
    thread_ = PyThread_get_thread_ident(), elsewhere_ = false;
    armed_ = true;
  }
  void disarm() { armed_ = false; }
  std::int64_t taken() const { return taken_; }
  bool elsewhere() const { return elsewhere_; }
  std::size_t settings(PyObject* now);

  // For the garbage collector: whom it knows knows it.
  int visit(visitproc visit, void* arg) {
    for (const Ref* const known : {&watcher_, &table_, &interrupts_, &ledger_, &budget_, &acquire_, &release_, &died_,
                                   &creations_, &expect_, &created_, &look_ahead_, &odd_, &followed_, &before_op_,
                                   &after_op_}) {
      Py_VISIT(known->get());
    }
    for (const auto& plan : plans_) {
      if (plan == nullptr) continue;
      for (const Ref* const known : {&plan->bound, &plan->beyond, &plan->refused}) Py_VISIT(known->get());
    }
    for (const Settings& settings : settings_) Py_VISIT(settings.now.get());
    return 0;
  }

  // Before the garbage collector takes an engine apart whose step did not end: the circles that it does not see.
  void part();
  // `died` of `build_register`, and `AbstractLedger.forget`.
  void died(PyObject* watch);

  // Between steps: storages whose size has to be asked for in Python, as it has changed or they are no usual ones; bytes
  // of all others that are present; and how many storages have escaped.
  PyObject* survey() const;
  // Of the tensors that `Session._tensors` knows by name, but for the batch: those whose storage is not in the table with
  // its size, and that `knows` does not know either. None where that has to be asked in Python.
  PyObject* uncounted(PyObject* models, PyObject* optimizers, PyObject* address, Knows* knows, void* memory) const;

  // Whether the op ran here; if not, nothing has changed.
  bool run(std::size_t place, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack);

 private:
  class Turn;
  bool create(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack);
  bool write(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack);
  bool normalise(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack);
  bool look(c10::ArrayRef<IValue> args, PyObject* clock, bool recorded, Operands& found, Arguments& seen);
  bool fits(Plan& plan, const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, Arguments& seen);
  void finish(const Plan& plan, const c10::OperatorHandle& op, Stack& stack, PyObject* clock, Ref reads, Ref payload,
              double seconds);
  std::int64_t needed(Plan& plan, const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, Arguments& seen);
  PyObject* environment(std::size_t settings);
  Ref record(const c10::OperatorHandle& op, Plan& plan, c10::ArrayRef<IValue> args, const Operands& found, Ref& reads);
  double call(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack);
  void remember(const Plan& plan, PyObject* clock, Ref reads, Ref payload, double seconds, PyObject* creates,
                PyObject* writes, std::int64_t nbytes, PyObject* value);
  Ref adopt(const at::Tensor& tensor, PyObject* clock);
  Ref value_of(PyObject* storage, PyObject* nbytes);
  PyObject* overwrite(PyObject* storage);
  bool is_plain(const at::Tensor& tensor) const;
  // The number of the next op, in a step that follows a plan.
  std::size_t next_op() const {
    if (moments_.empty() && creates_.empty()) return 0;
    return static_cast<std::size_t>(ledger_at_.clock.number_of(ledger_.get()) - first_op_);
  }
  int moment(std::size_t number) const { return number < moments_.size() ? moments_[number] : 0; }
  // How much has been created so far; only to be compared, where the plan says how much that op creates.
  std::int64_t created_until(std::size_t number) const {
    return number < creates_.size() ? budget_at_.created.number_of(budget_.get()) : 0;
  }
  // `Reclaimer.expect` and `Reclaimer.created`, but for what they do when it is time to look.
  void expect(std::int64_t nbytes) {
    if (nbytes <= headroom_.number_of(creations_.get())) return;
    const Ref told(PyObject_CallOneArg(expect_.get(), number(nbytes).get()));
  }
  void created(std::int64_t nbytes) {
    const std::int64_t left = headroom_.number_of(creations_.get()) - nbytes;
    if (left >= 0) return headroom_.put(creations_.get(), left);
    const Ref told(PyObject_CallOneArg(created_.get(), number(nbytes).get()));
  }

  PyObject* const self_;  // whose hook it is
  Ref watcher_, table_, interrupts_, ledger_, budget_, plain_, acquire_, release_;
  Ref storage_type_, value_type_, recipe_type_, watch_type_;
  Ref died_, deaths_, heard_, creations_, expect_, created_, look_ahead_, odd_;
  Ref followed_, before_op_, after_op_;
  Ref zero_, gone_, empty_, first_;
  struct {
    Slot escaped, exposed, handle, held, key, kind, locks, nbytes, number, touched, value, written;
  } storage_;
  struct {
    Slot absent, chain, dependents, home, leaves, nbytes, recipe, recorded, storage, wanted;
  } value_;
  struct {
    Slot clock, young, recipes, dead, next_number, events;
  } ledger_at_;
  struct {
    Slot resident, allowed, peak, created;
  } budget_at_;
  struct {
    Slot watching, within;
  } watcher_at_;
  Slot record_, headroom_, newest_;
  std::int64_t* cells_ = nullptr;
  bool limited_ = false;
  std::atomic<bool> armed_{false};
  bool recording_ = false, op_raised_ = false;
  bool small_ = false;  // whether the op takes next to no time
  std::int64_t taken_ = 0, first_op_ = 0;
  std::string moments_;  // of every op of a step that follows a plan
  std::vector<std::int64_t> creates_;  // what each of them creates
  unsigned long thread_ = 0;
  bool elsewhere_ = false;  // whether ops came from another thread
  std::vector<std::shared_ptr<Plan>> plans_;
  std::vector<Settings> settings_;
};

// Looked at without the GIL: only the hook of the watcher of one's own thread, which that keeps, may be followed.
struct Place {
  std::atomic<Hook*> hook{nullptr};
  std::atomic<const PyObject*> watcher{nullptr};
};
std::array<Place, HOOKS>& hooks() {
  static std::array<Place, HOOKS> all{};
  return all;
}
std::atomic<int> armed_hooks{0};

PyObject* member(PyObject* known, const char* name) {
  PyObject* const found = PyDict_GetItemString(known, name);
  if (found == nullptr) {
    PyErr_SetString(PyExc_KeyError, name);
    raise();
  }
  return found;
}

Hook::Hook(PyObject* self, PyObject* known) : self_(self) {
  const auto get = [&](const char* name) { return Ref::to(member(known, name)); };
  watcher_ = get("watcher"), table_ = get("table"), interrupts_ = get("interrupts"), ledger_ = get("ledger");
  budget_ = get("budget"), plain_ = get("plain");
  storage_type_ = get("storage"), value_type_ = get("value"), recipe_type_ = get("recipe"), watch_type_ = get("watch");
  died_ = get("died"), creations_ = get("creations"), look_ahead_ = get("look_ahead");
  expect_ = Ref(PyObject_GetAttrString(creations_.get(), "expect"));
  created_ = Ref(PyObject_GetAttrString(creations_.get(), "created"));
  headroom_ = {reinterpret_cast<PyObject*>(Py_TYPE(creations_.get())), "_headroom"};
  odd_ = get("odd");
  limited_ = member(known, "limited") == Py_True;
  cells_ = static_cast<std::int64_t*>(PyLong_AsVoidPtr(member(known, "cells")));
  zero_ = number(0), gone_ = number(GONE), empty_ = Ref(PyTuple_New(0));
  first_ = Ref(PyTuple_Pack(1, zero_.get()));
  PyObject* type = storage_type_.get();
  storage_ = {{type, "escaped"}, {type, "exposed"}, {type, "handle"}, {type, "held"},
              {type, "key"},     {type, "kind"},    {type, "locks"},  {type, "nbytes"},
              {type, "number"},  {type, "touched"}, {type, "value"},  {type, "written"}};
  type = value_type_.get();
  value_ = {{type, "absent"}, {type, "chain"},  {type, "dependents"}, {type, "home"},    {type, "leaves"},
            {type, "nbytes"}, {type, "recipe"}, {type, "recorded"},   {type, "storage"}, {type, "wanted"}};
  type = reinterpret_cast<PyObject*>(Py_TYPE(ledger_.get()));
  ledger_at_ = {{type, "clock"}, {type, "young"},        {type, "recipes"},
                {type, "_dead"}, {type, "_next_number"}, {type, "events"}};
  type = reinterpret_cast<PyObject*>(Py_TYPE(budget_.get()));
  budget_at_ = {{type, "resident"}, {type, "allowed"}, {type, "peak"}, {type, "created"}};
  type = reinterpret_cast<PyObject*>(Py_TYPE(watcher_.get()));
  watcher_at_ = {{type, "watching"}, {type, "within"}};
  record_ = Slot(watch_type_.get(), "record");
  deaths_ = made(deaths_type);
  auto& deaths = *reinterpret_cast<Deaths*>(deaths_.get());
  deaths.hook = this;
  deaths.record = record_, deaths.handle = storage_.handle, deaths.value = storage_.value;
  heard_ = Ref(PyCFunction_New(&deaths_method, deaths_.get()));
  for (auto& place : hooks()) {
    Hook* none = nullptr;
    if (place.hook.compare_exchange_strong(none, this)) {
      place.watcher = watcher_.get();
      break;
    }
  }
}

Hook::~Hook() {
  if (deaths_) reinterpret_cast<Deaths*>(deaths_.get())->hook = nullptr;
  for (auto& place : hooks()) {
    if (place.hook != this) continue;
    place.watcher = nullptr;
    place.hook = nullptr;
    break;
  }
}

// Of the session that watches this thread.
Hook* Hook::here() {
  static const std::string NAME = "spillway";
  using Kept = at::impl::ThreadLocalPythonObjects;
  if (!Kept::contains(NAME)) return nullptr;
  const PyObject* const watcher = Kept::get(NAME)->ptr(c10::impl::getGlobalPyInterpreter());
  for (auto& place : hooks()) {
    if (place.watcher.load(std::memory_order_acquire) != watcher) continue;
    Hook* const hook = place.hook;
    return hook->armed_ ? hook : nullptr;
  }
  return nullptr;
}

std::size_t Hook::settings(PyObject* now) {
  for (std::size_t place = 0; place < settings_.size(); ++place) {
    if (PyObject_RichCompareBool(settings_[place].now.get(), now, Py_EQ) == 1) return place;
  }
  settings_.push_back({Ref::to(now), Ref(), {}});
  return settings_.size() - 1;
}

// Nothing that the op consists of arrives.
class Hidden {
 public:
  Hidden() { c10::impl::tls_set_dispatch_key_included(ARRIVES, false); }
  ~Hidden() { c10::impl::tls_set_dispatch_key_included(ARRIVES, true); }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};

DispatchKeySet below(DispatchKeySet keys) { return keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, ARRIVES); }

// What `_arrive` does in Python around every op.
class Hook::Turn {
 public:
  explicit Turn(Hook& hook) : hook_(hook) {
    PyObject* const watcher = hook.watcher_.get();
    const unsigned long thread = PyThread_get_thread_ident();
    const Slot& within = hook.watcher_at_.within;
    if (PyLong_AsUnsignedLong(within.of(watcher)) == thread) return;
    const Ref acquired(PyObject_CallNoArgs(hook.acquire_.get()));
    held_ = true;
    if (hook.watcher_at_.watching.of(watcher) != Py_True) return;
    within.put(watcher, static_cast<std::int64_t>(thread));
    c10::impl::tls_set_dispatch_key_included(ARRIVES, false);
    ours = true;
  }
  ~Turn() {
    if (ours) {
      const bool watching = hook_.watcher_at_.watching.of(hook_.watcher_.get()) == Py_True;
      c10::impl::tls_set_dispatch_key_included(ARRIVES, watching);
      hook_.watcher_at_.within.put(hook_.watcher_.get(), hook_.zero_.get());
    }
    if (held_) {
      PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
      PyErr_Fetch(&type, &error, &trace);
      Py_XDECREF(PyObject_CallNoArgs(hook_.release_.get()));
      PyErr_Restore(type, error, trace);
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  bool ours = false;

 private:
  Hook& hook_;
  bool held_ = false;
};

bool Hook::is_plain(const at::Tensor& tensor) const {
  static const DispatchKeySet odd({DispatchKey::Python, DispatchKey::NestedTensor});
  if (tensor.layout() != c10::kStrided || tensor.key_set().has_any(odd)) return false;
  PyObject* const object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (object == nullptr) return true;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(plain_.get()); ++place) {
    if (PyTuple_GET_ITEM(plain_.get(), place) == type) return true;
  }
  return false;
}

bool Hook::run(std::size_t place, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack) {
  const Gil gil;
  const Ref kept = Ref::to(self_);  // what runs may end the session
  elsewhere_ |= PyThread_get_thread_ident() != thread_;
  if (place >= plans_.size() || plans_[place] == nullptr) return false;
  const std::shared_ptr<Plan> plan = plans_[place];  // what runs may have all of them forgotten
  if (c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python)) return false;
  if (plan->kind == Kind::VIEW) {
    const IValue& viewed = stack[stack.size() - op.schema().arguments().size()];
    if (!viewed.isTensor() || !viewed.toTensor().defined() || !is_plain(viewed.toTensor())) return false;
    if (PyLong_AsUnsignedLong(watcher_at_.within.of(watcher_.get())) == PyThread_get_thread_ident()) return false;
    ++taken_;
    const Hidden hidden;
    op.redispatchBoxed(below(keys), &stack);
    return true;
  }
  if (PyList_GET_SIZE(interrupts_.get()) != 0 || ledger_at_.events.of(ledger_.get()) != Py_None) return false;
  const Turn turn(*this);
  if (!turn.ours) return false;
  op_raised_ = false;
  small_ = plan->small;
  const std::size_t number = next_op();
  int moment = this->moment(number);
  if ((moment & BEFORE) != 0) {  // asked again by the handlers it does nothing
    const Ref done(PyObject_CallNoArgs(before_op_.get()));
    if (PyList_GET_SIZE(interrupts_.get()) != 0) return false;
  }
  const std::int64_t created = created_until(number);
  try {
    const bool ran = plan->kind == Kind::CREATES      ? create(*plan, op, keys, stack)
                     : plan->kind == Kind::NORMALISES ? normalise(*plan, op, keys, stack)
                                                      : write(*plan, op, keys, stack);
    if (!ran) return false;
    ++taken_;
    if (number < creates_.size() && created_until(number) - created != creates_[number]) moment |= AFTER;
    if ((moment & AFTER) != 0) const Ref done(PyObject_CallNoArgs(after_op_.get()));
    if (!moments_.empty() || !creates_.empty()) newest_.put(followed_.get(), ledger_at_.next_number.of(ledger_.get()));
    return true;
  } catch (const std::bad_alloc&) {
    if (op_raised_) throw;  // which is torch's own error
    PyErr_NoMemory();
    raise();
  }
}

// Finds the storages of an op's tensors; false where the handlers in Python have to look themselves.
bool Hook::look(c10::ArrayRef<IValue> args, PyObject* clock, bool recorded, Operands& found,
                Arguments& seen) {
  for (std::size_t place = 0; place < args.size(); ++place) {
    const IValue& given = args[place];
    if (!given.isTensor()) {
      if (!seen.other(given)) return false;
      continue;
    }
    const at::Tensor& tensor = given.toTensor();
    if (!tensor.defined()) {
      seen.words.push_back(1);
      continue;
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a number in Python
      seen.wrapped(tensor);
      continue;
    }
    if (!is_plain(tensor) || !tensor.has_storage()) return false;
    const Ref address(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
    PyObject* const storage = PyDict_GetItemWithError(table_.get(), address.get());
    if (storage == nullptr) return false;
    storage_.touched.put(storage, clock);
    PyObject* const value = storage_.value.of(storage);
    if (value == Py_None || value_.absent.number_of(value) != HERE) return false;
    if (recorded && (c10::isComplexType(tensor.scalar_type()) || c10::isQIntType(tensor.scalar_type()))) return false;
    small_ = small_ && tensor.numel() <= SMALL;
    seen.tensor(tensor);
    found.push_back({place, Ref::to(storage), Ref::to(value)});
  }
  return true;
}

// What Python's bound says of such arguments; `UNBOUNDED` where it says nothing.
std::int64_t Hook::needed(Plan& plan, const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, Arguments& seen) {
  const auto found = plan.needs.find(seen.words);
  if (found != plan.needs.end()) return found->second;
  std::int64_t needed = UNBOUNDED;
  if (plan.bound.get() != Py_None) {
    const auto& arguments = op.schema().arguments();
    std::size_t positional = 0;
    while (positional < args.size() && !arguments[positional].kwarg_only()) ++positional;
    const Ref given(PyTuple_New(static_cast<Py_ssize_t>(positional)));
    for (std::size_t place = 0; place < positional; ++place) {
      PyObject* const converted = torch::jit::toPyObject(args[place]).release().ptr();
      PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(place), converted);
    }
    const Ref bound(PyObject_CallOneArg(plan.bound.get(), given.get()));
    int beyond = 0;  // any number
    if (bound.get() != Py_None) needed = PyLong_AsLongLongAndOverflow(bound.get(), &beyond);
    if (PyErr_Occurred() != nullptr) raise();
    if (beyond != 0) needed = UNBOUNDED;
  }
  if (plan.needs.size() >= MOST_NEEDS) plan.needs.clear();
  plan.needs.emplace(seen.words, needed);
  return needed;
}

PyObject* Hook::environment(std::size_t place) {
  Settings& settings = settings_[place];
  const Fingerprint now = fingerprint();
  if (!settings.environment || settings.seen != now) {
    settings.environment = Ref(PyObject_CallNoArgs(settings.now.get()));
    settings.seen = now;
  }
  return settings.environment.get();
}

// The payload of a recipe and what it reads.
Ref Hook::record(const c10::OperatorHandle& op, Plan& plan, c10::ArrayRef<IValue> args, const Operands& found,
                 Ref& reads) {
  Ref self = payload_of(op, environment(plan.settings), first_.get());
  Recorded& recorded = *reinterpret_cast<Payload*>(self.get())->recorded;
  recorded.args.reserve(args.size());
  reads = Ref(PyList_New(static_cast<Py_ssize_t>(found.size())));
  std::size_t next = 0;
  for (std::size_t place = 0; place < args.size(); ++place) {
    if (next < found.size() && found[next].place == place) {
      PyObject* const value = found[next].value.get();
      value_.recorded.put(value, Py_True);
      PyList_SET_ITEM(reads.get(), static_cast<Py_ssize_t>(next), Py_NewRef(value));
      recorded.operands.emplace_back(place, Geometry(args[place].toTensor()));
      recorded.args.emplace_back();
      ++next;
    } else {
      recorded.args.push_back(args[place]);
    }
  }
  return self;
}

// Runs the op; its seconds. What it takes for itself counts, as in `CpuMachine.counted`.
double Hook::call(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack) {
  if (cells_ != nullptr) {
    cells_[RESIDENT] = budget_at_.resident.number_of(budget_.get());
    cells_[STATE] = BEGINS;
  }
  timespec began{}, ended{};
  try {
    const WhileOpRuns without(small_);
    ::clock_gettime(CLOCK_MONOTONIC, &began);
    op.redispatchBoxed(below(keys), &stack);
    ::clock_gettime(CLOCK_MONOTONIC, &ended);
  } catch (const c10::OutOfMemoryError& error) {
    op_raised_ = true;
    const bool refused = cells_ != nullptr && std::exchange(cells_[STATE], IDLE) == REFUSED;
    if (!refused) throw;
    const Ref said(PyUnicode_FromString(error.what_without_backtrace()));
    const Ref raised(PyObject_CallOneArg(plan.refused.get(), said.get()));  // which raises
    throw;
  } catch (...) {
    op_raised_ = true;
    if (cells_ != nullptr) cells_[STATE] = IDLE;
    throw;
  }
  const double seconds =
      static_cast<double>(ended.tv_sec - began.tv_sec) + 1e-9 * static_cast<double>(ended.tv_nsec - began.tv_nsec);
  if (cells_ != nullptr && std::exchange(cells_[STATE], IDLE) > RUNS) {
    const Ref results(PyList_New(0));
    for (const IValue& result : torch::jit::last(stack, op.schema().returns().size())) {
      if (!result.isTensor() || !result.toTensor().defined()) continue;
      const Ref wrapped(THPVariable_Wrap(result.toTensor()));
      if (PyList_Append(results.get(), wrapped.get()) != 0) raise();
    }
    const Ref done(PyObject_CallOneArg(plan.beyond.get(), results.get()));
  }
  return seconds;
}

Ref Hook::value_of(PyObject* storage, PyObject* nbytes) {
  Ref value = made(value_type_.get());
  PyObject* const self = value.get();
  value_.storage.put(self, storage);
  value_.nbytes.put(self, nbytes);
  for (const Slot* const slot : {&value_.absent, &value_.wanted, &value_.chain}) slot->put(self, zero_.get());
  for (const Slot* const slot : {&value_.recipe, &value_.home, &value_.leaves, &value_.dependents}) {
    slot->put(self, Py_None);
  }
  value_.recorded.put(self, Py_False);
  return value;
}

// `register` and `AbstractLedger.adopt`: takes a new storage into account. None if it is there already, or nobody's.
// The garbage collector would walk thousands of records again and again, and does not see these: the circles that they
// are in end when the storage dies.
Ref Hook::adopt(const at::Tensor& tensor, PyObject* clock) {
  const bool usual = tensor.is_cpu() && tensor.layout() == c10::kStrided && tensor.has_storage();
  if (!usual || tensor.key_set().has(DispatchKey::Python)) {
    const Ref wrapped(THPVariable_Wrap(tensor));
    const Ref done(PyObject_CallOneArg(odd_.get(), wrapped.get()));
    return {};
  }
  const c10::Storage& storage = tensor.storage();
  const Ref key(PyLong_FromVoidPtr(storage.unsafeGetStorageImpl()));
  if (PyDict_GetItemWithError(table_.get(), key.get()) != nullptr) return {};
  const auto size = static_cast<std::int64_t>(storage.nbytes());
  const Ref nbytes = number(size);
  const Ref real(THPStorage_Wrap(storage));
  const Ref given(PyTuple_Pack(2, real.get(), heard_.get()));
  auto* const type = reinterpret_cast<PyTypeObject*>(watch_type_.get());
  const Ref watch(type->tp_new(type, given.get(), nullptr));  // of a weak reference, `__init__` does nothing

  PyObject* const ledger = ledger_.get();
  const Ref next = number(ledger_at_.next_number.number_of(ledger) + 1);
  ledger_at_.next_number.put(ledger, next.get());
  Ref record = made(storage_type_.get());
  PyObject* const self = record.get();
  storage_.number.put(self, next.get());
  storage_.key.put(self, key.get());
  storage_.nbytes.put(self, nbytes.get());
  storage_.handle.put(self, watch.get());
  storage_.touched.put(self, clock);
  storage_.locks.put(self, zero_.get());
  storage_.held.put(self, zero_.get());
  for (const Slot* const slot : {&storage_.written, &storage_.escaped, &storage_.exposed}) slot->put(self, Py_False);
  storage_.kind.put(self, Py_None);
  storage_.value.put(self, value_of(self, nbytes.get()).get());

  PyObject* const budget = budget_.get();
  budget_at_.created.put(budget, budget_at_.created.number_of(budget) + size);
  const std::int64_t resident = budget_at_.resident.number_of(budget) + size;
  budget_at_.resident.put(budget, resident);
  if (resident > budget_at_.peak.number_of(budget)) budget_at_.peak.put(budget, resident);
  if (size >= SMALLEST_MOVABLE && PyList_Append(ledger_at_.young.of(ledger), self) != 0) raise();
  if (PyDict_SetItem(table_.get(), key.get(), self) != 0) raise();
  record_.put(watch.get(), self);
  // The garbage collector moves a weak reference with a callback to a list of its own when what it is to is garbage:
  // one that it does not track would be in no list.
  for (PyObject* const one : {self, storage_.value.of(self)}) PyObject_GC_UnTrack(one);
  if (size >= LARGE) {
    created(size);
    if (look_ahead_.get() != Py_None) const Ref done(PyObject_CallNoArgs(look_ahead_.get()));
  }
  return record;
}

// `AbstractLedger.remember`. A step keeps thousands of recipes, and the garbage collector would walk them again and
// again: it does not see them. The circles that they are in with values end with the step
// (`AbstractLedger.forget_recipes`).
void Hook::remember(const Plan& plan, PyObject* clock, Ref reads, Ref payload, double seconds, PyObject* creates,
                    PyObject* writes, std::int64_t nbytes, PyObject* value) {
  Ref recipe = made(recipe_type_.get(), 10);
  PyObject* const self = recipe.get();
  PyTuple_SET_ITEM(self, 0, Py_NewRef(clock));
  PyTuple_SET_ITEM(self, 1, Py_NewRef(plan.name.get()));
  PyTuple_SET_ITEM(self, 2, reads.release());
  PyTuple_SET_ITEM(self, 3, payload.release());
  PyTuple_SET_ITEM(self, 4, Ref(PyFloat_FromDouble(seconds)).release());
  PyTuple_SET_ITEM(self, 5, Py_NewRef(plan.exactness.get()));
  PyTuple_SET_ITEM(self, 6, Py_NewRef(creates));
  PyTuple_SET_ITEM(self, 7, Py_NewRef(writes));
  PyTuple_SET_ITEM(self, 8, number(nbytes).release());
  PyTuple_SET_ITEM(self, 9, Py_NewRef(zero_.get()));
  for (const Py_ssize_t circular : {2, 6, 7}) {
    if (PyObject_GC_IsTracked(PyTuple_GET_ITEM(self, circular))) PyObject_GC_UnTrack(PyTuple_GET_ITEM(self, circular));
  }
  PyObject_GC_UnTrack(self);
  if (value != nullptr) value_.recipe.put(value, self);
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(creates); ++place) {
    value_.recipe.put(PyTuple_GET_ITEM(creates, place), self);
  }
  if (PyList_Append(ledger_at_.recipes.of(ledger_.get()), self) != 0) raise();
}

// Whether what the op creates has room at once.
bool Hook::fits(Plan& plan, const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, Arguments& seen) {
  const std::int64_t bound = needed(plan, op, args, seen);
  PyObject* const budget = budget_.get();
  const std::int64_t left = budget_at_.allowed.number_of(budget) - budget_at_.resident.number_of(budget);
  if (bound == UNBOUNDED || bound > left) return false;
  if (bound >= LARGE) expect(bound / plan.safety);
  small_ = small_ && bound < SMALL;
  return true;
}

// Registers what the op created, under one recipe if there is a payload for it.
void Hook::finish(const Plan& plan, const c10::OperatorHandle& op, Stack& stack, PyObject* clock, Ref reads,
                  Ref payload, double seconds) {
  c10::SmallVector<Ref, 4> created;
  c10::SmallVector<std::int64_t, 4> positions;
  std::int64_t position = 0, nbytes = 0;
  for (const IValue& result : torch::jit::last(stack, op.schema().returns().size())) {
    if (!result.isTensor() || !result.toTensor().defined()) continue;
    if (Ref storage = adopt(result.toTensor(), clock)) {
      nbytes += storage_.nbytes.number_of(storage.get());
      created.push_back(std::move(storage));
      positions.push_back(position);
    }
    ++position;
  }
  if (!payload || created.empty()) return;
  const auto count = static_cast<Py_ssize_t>(created.size());
  const Ref creates(PyTuple_New(count));
  for (Py_ssize_t place = 0; place < count; ++place) {
    PyObject* const storage = created[static_cast<std::size_t>(place)].get();
    PyTuple_SET_ITEM(creates.get(), place, Py_NewRef(storage_.value.of(storage)));
  }
  if (position > 1 || positions[0] != 0) {
    Ref outputs(PyTuple_New(count));
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyTuple_SET_ITEM(outputs.get(), place, number(positions[static_cast<std::size_t>(place)]).release());
    }
    auto* const written = reinterpret_cast<Payload*>(payload.get());
    Py_DECREF(std::exchange(written->outputs, outputs.release()));
  }
  remember(plan, clock, std::move(reads), std::move(payload), seconds, creates.get(), empty_.get(), nbytes, nullptr);
}

// `_creating` and `_creating_with_recipe`.
bool Hook::create(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack) {
  const bool recorded = plan.recorded && recording_;
  const auto args = torch::jit::last(stack, op.schema().arguments().size());
  const Ref clock = number(ledger_at_.clock.number_of(ledger_.get()) + 1);
  Operands found;
  Arguments seen;
  if (!look(args, clock.get(), recorded, found, seen)) return false;
  if (limited_ && !fits(plan, op, args, seen)) return false;
  ledger_at_.clock.put(ledger_.get(), clock.get());
  Ref reads, payload;
  if (recorded) payload = record(op, plan, args, found, reads);
  const double seconds = call(plan, op, keys, stack);
  finish(plan, op, stack, clock.get(), std::move(reads), std::move(payload), seconds);
  return true;
}

// `_normalising`. What it writes are running statistics, which a replay does without.
bool Hook::normalise(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack) {
  const auto args = torch::jit::last(stack, op.schema().arguments().size());
  if (plan.training >= 0 && !(args[static_cast<std::size_t>(plan.training)].isBool() &&
                              args[static_cast<std::size_t>(plan.training)].toBool())) {
    return false;
  }
  const Ref clock = number(ledger_at_.clock.number_of(ledger_.get()) + 1);
  Operands found, read, written;
  Arguments seen;
  if (!look(args, clock.get(), true, found, seen)) return false;
  for (Operand& operand : found) {
    const bool scratch = std::find(plan.scratch.begin(), plan.scratch.end(), operand.place) != plan.scratch.end();
    PyObject* const dependents = value_.dependents.of(operand.value.get());
    if (scratch && dependents != Py_None && PyDict_GET_SIZE(dependents) != 0) return false;
    (scratch ? written : read).push_back(std::move(operand));
  }
  if (!fits(plan, op, args, seen)) return false;
  ledger_at_.clock.put(ledger_.get(), clock.get());
  Ref reads;
  Ref payload = record(op, plan, args, read, reads);
  Recorded& recorded = *reinterpret_cast<Payload*>(payload.get())->recorded;
  for (const Operand& operand : written) {
    recorded.scratch.emplace_back(operand.place, Geometry(args[operand.place].toTensor()));
    recorded.args[operand.place] = IValue();
  }
  const auto next_versions = [&] {  // in an error whatever it wrote until then
    for (const Operand& operand : written) overwrite(operand.storage.get());
  };
  double seconds = 0;
  try {
    seconds = call(plan, op, keys, stack);
  } catch (...) {
    next_versions();
    throw;
  }
  next_versions();
  finish(plan, op, stack, clock.get(), std::move(reads), std::move(payload), seconds);
  return true;
}

// `AbstractLedger.overwrite` without a recipe: the next version begins. Borrowed from the storage.
PyObject* Hook::overwrite(PyObject* storage) {
  PyObject* const old = storage_.value.of(storage);
  if (old != Py_None) {
    value_.absent.put(old, gone_.get());
    if (storage_.escaped.of(storage) == Py_True) value_.recipe.put(old, Py_None);
    if (value_.home.of(old) != Py_None && PyList_Append(ledger_at_.dead.of(ledger_.get()), old) != 0) raise();
  }
  const Ref value = value_of(storage, storage_.nbytes.of(storage));
  if (!PyObject_GC_IsTracked(storage)) PyObject_GC_UnTrack(value.get());  // as it is in `adopt`
  storage_.value.put(storage, value.get());
  return value.get();
}

// `_writing`, of what writes nothing too; `_filling` and `_recorded_write`.
bool Hook::write(Plan& plan, const c10::OperatorHandle& op, DispatchKeySet keys, Stack& stack) {
  const auto args = torch::jit::last(stack, op.schema().arguments().size());
  const Ref clock = number(ledger_at_.clock.number_of(ledger_.get()) + 1);
  Operands found;
  Arguments seen;
  if (!look(args, clock.get(), false, found, seen)) return false;
  PyObject* const budget = budget_.get();
  if (budget_at_.resident.number_of(budget) > budget_at_.allowed.number_of(budget)) return false;
  if (plan.kind == Kind::READS) {
    ledger_at_.clock.put(ledger_.get(), clock.get());
    call(plan, op, keys, stack);
    return true;
  }
  if (found.empty() || found[0].place != 0) return false;
  const Ref target = std::move(found[0].storage), old = Ref::to(found[0].value.get());
  const auto size = static_cast<std::int64_t>(args[0].toTensor().storage().nbytes());
  if (plan.resized && size != storage_.nbytes.number_of(target.get())) return false;
  PyObject* const dependents = value_.dependents.of(old.get());
  if (dependents != Py_None && PyDict_GET_SIZE(dependents) != 0) return false;
  const bool recorded = value_.recipe.of(old.get()) != Py_None;
  if (recorded) {
    if (!plan.recorded || plan.seeded) return false;
    for (const Operand& operand : found) {
      const auto dtype = args[operand.place].toTensor().scalar_type();
      if (c10::isComplexType(dtype) || c10::isQIntType(dtype)) return false;
    }
  }
  Ref reads, payload;
  if (recorded) payload = record(op, plan, args, found, reads);
  ledger_at_.clock.put(ledger_.get(), clock.get());
  double seconds = 0;
  try {
    seconds = call(plan, op, keys, stack);
  } catch (...) {
    overwrite(target.get());  // whatever it wrote until then
    throw;
  }
  if (recorded) {
    const Ref value = Ref::to(overwrite(target.get()));
    const Ref edge(PyTuple_Pack(2, zero_.get(), value.get()));
    const Ref edges(PyTuple_Pack(1, edge.get()));
    remember(plan, clock.get(), std::move(reads), std::move(payload), seconds, empty_.get(), edges.get(), 0,
             value.get());
  } else if (value_.recorded.of(old.get()) == Py_True || value_.home.of(old.get()) != Py_None) {
    overwrite(target.get());
  }
  return true;
}

void Hook::died(PyObject* watch) {
  PyObject* const known = record_.of(watch);
  if (known == nullptr) return;  // Ctrl-C came before it had one
  const Ref storage = Ref::to(known);
  PyObject *const self = storage.get(), *const ledger = ledger_.get(), *const budget = budget_.get();
  const Ref value = Ref::to(storage_.value.of(self));
  const bool usual = value.get() != Py_None && value_.absent.number_of(value.get()) == HERE;
  if (!usual || ledger_at_.events.of(ledger) != Py_None) {
    const Ref done(PyObject_CallOneArg(died_.get(), watch));
    return;
  }
  PyObject* const key = storage_.key.of(self);
  if (PyDict_GetItemWithError(table_.get(), key) != nullptr && PyDict_DelItem(table_.get(), key) != 0) raise();
  storage_.handle.put(self, Py_None);
  storage_.value.put(self, Py_None);
  const std::int64_t size = storage_.nbytes.number_of(self);
  budget_at_.resident.put(budget, budget_at_.resident.number_of(budget) - size);
  if (cells_ != nullptr && cells_[UNWATCHED] != 0) cells_[RESIDENT] -= size;
  value_.absent.put(value.get(), gone_.get());
  if (storage_.escaped.of(self) == Py_True) value_.recipe.put(value.get(), Py_None);
  if (value_.home.of(value.get()) != Py_None || value_.leaves.of(value.get()) != Py_None) {
    if (PyList_Append(ledger_at_.dead.of(ledger), value.get()) != 0) raise();
  }
}

PyObject* Hook::survey() const {
  const Ref odd(PyList_New(0));
  std::int64_t present = 0, escaped = 0;
  PyObject *key = nullptr, *storage = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(table_.get(), &place, &key, &storage) != 0;) {
    escaped += storage_.escaped.of(storage) == Py_True ? 1 : 0;
    PyObject *const value = storage_.value.of(storage), *const handle = storage_.handle.of(storage);
    const auto* const real = static_cast<const c10::StorageImpl*>(PyLong_AsVoidPtr(key));
    const std::int64_t size = storage_.nbytes.number_of(storage);
    const bool here = value != Py_None && value_.absent.number_of(value) == HERE;
    const bool alive = real != nullptr && PyWeakref_Check(handle) != 0 && PyWeakref_GET_OBJECT(handle) != Py_None;
    if (!here || !alive || static_cast<std::int64_t>(real->nbytes()) != size) {
      if (PyList_Append(odd.get(), storage) != 0) raise();
    } else {
      present += size;
    }
  }
  return Py_BuildValue("OLL", odd.get(), static_cast<long long>(present), static_cast<long long>(escaped));
}

// Of a tensor as nearly all are: strided, and with a storage of its own. Null of others.
c10::StorageImpl* plain_storage(const at::Tensor& tensor) {
  static const DispatchKeySet odd({DispatchKey::Python, DispatchKey::NestedTensor, DispatchKey::FuncTorchGradWrapper,
                                   DispatchKey::FuncTorchBatched});
  if (tensor.layout() != c10::kStrided || tensor.key_set().has_any(odd) || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

// Walks what is known by name. Whoever looks says false where a tensor is of no usual kind.
class Walk {
 public:
  using Look = std::function<bool(const at::Tensor&)>;
  explicit Walk(Look look) : look_(std::move(look)) {}

  // False where a part is of no usual kind.
  bool all(PyObject* models, PyObject* optimizers) {
    for (Py_ssize_t one = 0; one < PyTuple_GET_SIZE(models); ++one) {
      if (!module(PyTuple_GET_ITEM(models, one))) return false;
    }
    for (Py_ssize_t one = 0; one < PyTuple_GET_SIZE(optimizers); ++one) {
      if (!optimizer(PyTuple_GET_ITEM(optimizers, one))) return false;
    }
    return true;
  }
  bool look(PyObject* value) { return THPVariable_Check(value) && look_(THPVariable_Unpack(value)); }

 private:
  bool module(PyObject* module) {
    if (!seen_.insert(module).second) return true;
    static const std::array names = {PyUnicode_InternFromString("_parameters"), PyUnicode_InternFromString("_buffers"),
                                     PyUnicode_InternFromString("_modules")};
    const Ref dict(PyObject_GenericGetDict(module, nullptr));
    std::array<PyObject*, names.size()> parts{};
    for (std::size_t one = 0; one < parts.size(); ++one) {
      parts[one] = PyDict_GetItemWithError(dict.get(), names[one]);
      if (parts[one] == nullptr || PyDict_CheckExact(parts[one]) == 0) return false;
    }
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(parts[0], &place, &key, &value) != 0;) {
      if (value == Py_None) continue;
      const Ref held = Ref::to(value);  // a collection of garbage may come between
      if (!look(value)) return false;
      const at::Tensor& parameter = THPVariable_Unpack(value);
      if (!parameter.is_leaf() && !parameter.retains_grad()) continue;
      if (const at::Tensor gradient = parameter.grad(); gradient.defined() && !look_(gradient)) return false;
    }
    for (Py_ssize_t place = 0; PyDict_Next(parts[1], &place, &key, &value) != 0;) {
      if (value != Py_None && !look(value)) return false;
    }
    for (Py_ssize_t place = 0; PyDict_Next(parts[2], &place, &key, &value) != 0;) {
      if (value != Py_None && !this->module(value)) return false;
    }
    return true;
  }
  bool optimizer(PyObject* optimizer) {
    const Ref state(PyObject_GetAttrString(optimizer, "state"));
    if (PyDict_Check(state.get()) == 0) return false;
    PyObject *key = nullptr, *entry = nullptr, *name = nullptr, *value = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(state.get(), &place, &key, &entry) != 0;) {
      if (PyDict_Check(entry) == 0) return false;
      for (Py_ssize_t at = 0; PyDict_Next(entry, &at, &name, &value) != 0;) {
        if (PyList_Check(value) != 0 || PyDict_Check(value) != 0) return false;  // of more tensors, as LBFGS has them
        if (THPVariable_Check(value) && !look(value)) return false;
      }
    }
    return true;
  }

  const Look look_;
  std::unordered_set<PyObject*> seen_;
};

PyObject* Hook::uncounted(PyObject* models, PyObject* optimizers, PyObject* address, Knows* knows, void* memory) const {
  const Ref found(PyList_New(0));
  const auto counted = [&](c10::StorageImpl* real) {
    const Ref key(PyLong_FromVoidPtr(real));
    PyObject* const storage = PyDict_GetItemWithError(table_.get(), key.get());
    if (storage != nullptr) return storage_.nbytes.number_of(storage) == static_cast<std::int64_t>(real->nbytes());
    return knows(memory, real) != 0;
  };
  Walk walk([&](const at::Tensor& tensor) {
    c10::StorageImpl* real = plain_storage(tensor);
    if (real != nullptr && counted(real)) return true;
    const Ref wrapped(THPVariable_Wrap(tensor));
    if (real == nullptr) {
      PyObject* const key = PyObject_CallOneArg(address, wrapped.get());
      if (key == nullptr) {  // it has no storage
        if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) raise();
        PyErr_Clear();
        return true;
      }
      const Ref owned(key);
      real = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(key));
      if (real == nullptr || counted(real)) return true;
    }
    if (PyList_Append(found.get(), wrapped.get()) != 0) raise();
    return true;
  });
  return walk.all(models, optimizers) ? Py_NewRef(found.get()) : Py_NewRef(Py_None);
}

// Bytes of the storages of these, by the address of their memory; None where one is of no usual kind.
PyObject* module_named(PyObject*, PyObject* args) {
  BEGIN_CALL
  PyObject *models = nullptr, *optimizers = nullptr, *others = nullptr;
  if (PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &models, &PyTuple_Type, &optimizers, &PyTuple_Type, &others) == 0) {
    return nullptr;
  }
  const Ref found(PyDict_New());
  Walk walk([&](const at::Tensor& tensor) {
    c10::StorageImpl* const real = plain_storage(tensor);
    if (real == nullptr || real->device_type() != c10::DeviceType::CPU) return false;
    const Ref address(PyLong_FromVoidPtr(const_cast<void*>(real->data()))), size = number(real->nbytes());
    if (PyDict_SetItem(found.get(), address.get(), size.get()) != 0) raise();
    return true;
  });
  bool usual = walk.all(models, optimizers);
  for (Py_ssize_t one = 0; usual && one < PyTuple_GET_SIZE(others); ++one) usual = walk.look(PyTuple_GET_ITEM(others, one));
  return usual ? Py_NewRef(found.get()) : Py_NewRef(Py_None);
  END_CALL
}

PyObject* deaths_heard(PyObject* self, PyObject* watch) {
  BEGIN_CALL
  const Deaths& deaths = *reinterpret_cast<Deaths*>(self);
  if (deaths.hook != nullptr) {
    deaths.hook->died(watch);
  } else if (PyObject* const known = deaths.record.of(watch); known != nullptr) {
    const Ref storage = Ref::to(known);
    deaths.handle.put(known, Py_None);
    deaths.value.put(known, Py_None);
  }
  Py_RETURN_NONE;
  END_CALL
}

void Hook::part() {
  reinterpret_cast<Deaths*>(deaths_.get())->hook = nullptr;  // the books may be taken apart before a storage dies
  PyObject* const recipes = ledger_at_.recipes.of(ledger_.get());
  if (recipes == nullptr) return;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(recipes); ++place) {
    const Ref recipe = Ref::to(PyList_GET_ITEM(recipes, place));
    const Ref creates(PySequence_Tuple(PyTuple_GET_ITEM(recipe.get(), 6)));
    const Ref writes(PySequence_Tuple(PyTuple_GET_ITEM(recipe.get(), 7)));
    for (Py_ssize_t one = 0; one < PyTuple_GET_SIZE(creates.get()); ++one) {
      value_.recipe.put(PyTuple_GET_ITEM(creates.get(), one), Py_None);
    }
    for (Py_ssize_t one = 0; one < PyTuple_GET_SIZE(writes.get()); ++one) {
      value_.recipe.put(PyTuple_GET_ITEM(PyTuple_GET_ITEM(writes.get(), one), 1), Py_None);
    }
  }
  if (PyList_SetSlice(recipes, 0, PyList_GET_SIZE(recipes), nullptr) != 0) raise();
}

// ------------------------------------------------------------------------------------------- where ops of torch arrive

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(std::size_t place) : place_(place) {}
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Hook* const hook = armed_hooks.load(std::memory_order_relaxed) != 0 ? Hook::here() : nullptr;
    if (hook == nullptr || !hook->run(place_, op, keys, *stack)) op.callBoxedForDispatchKey(LONG_WAY, *stack);
  }

 private:
  const std::size_t place_;
};

std::unordered_map<std::string, std::size_t>& places() {
  static auto* const all = new std::unordered_map<std::string, std::size_t>;
  return *all;
}

// From now on ops of this name, in full, arrive here first.
void serve(const std::string& name) {
  static auto* const libraries = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>;
  const std::string space = name.substr(0, name.find("::"));
  auto& library = (*libraries)[space];
  if (library == nullptr) {
    library = std::make_unique<torch::Library>(torch::Library::IMPL, space, ARRIVES, __FILE__, __LINE__);
  }
  const std::size_t place = places().emplace(name, places().size()).first->second;
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(place)));
}

struct HookObject {
  PyObject_HEAD
  Hook* hook;  // null once it was garbage
  bool armed;
};
HookObject& object_of(PyObject* self) { return *reinterpret_cast<HookObject*>(self); }

void set_armed(PyObject* self, bool armed) {
  bool& before = object_of(self).armed;
  armed_hooks += static_cast<int>(armed) - static_cast<int>(before);
  before = armed;
}

PyObject* hook_new(PyTypeObject* type, PyObject*, PyObject* known) {
  BEGIN_CALL
  Ref self(type->tp_alloc(type, 0));
  object_of(self.get()).hook = new Hook(self.get(), known);
  return self.release();
  END_CALL
}
int hook_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return object_of(self).hook != nullptr ? object_of(self).hook->visit(visit, arg) : 0;
}
void hook_finalize(PyObject* self) {
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  try {
    if (Hook* const hook = object_of(self).hook; hook != nullptr) hook->part();
  } catch (...) {
    PyErr_WriteUnraisable(self);
  }
  PyErr_Restore(type, error, trace);
}
int hook_clear(PyObject* self) {
  set_armed(self, false);
  delete std::exchange(object_of(self).hook, nullptr);
  return 0;
}
void hook_dealloc(PyObject* self) {
  if (PyObject_CallFinalizerFromDealloc(self) != 0) return;
  PyObject_GC_UnTrack(self);
  hook_clear(self);
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* hook_arm(PyObject* self, PyObject* args) {
  BEGIN_CALL
  int recording = 0;
  PyObject* plan = nullptr;
  if (PyArg_ParseTuple(args, "pO", &recording, &plan) == 0) return nullptr;
  if (Hook* const hook = object_of(self).hook; hook != nullptr) {
    hook->arm(recording != 0, plan);
    set_armed(self, true);
  }
  Py_RETURN_NONE;
  END_CALL
}
PyObject* hook_disarm(PyObject* self, PyObject*) {
  if (Hook* const hook = object_of(self).hook; hook != nullptr) hook->disarm();
  set_armed(self, false);
  Py_RETURN_NONE;
}
PyObject* hook_survey(PyObject* self, PyObject*) {
  BEGIN_CALL
  if (const Hook* const hook = object_of(self).hook; hook != nullptr) return hook->survey();
  Py_RETURN_NONE;
  END_CALL
}
PyObject* hook_uncounted(PyObject* self, PyObject* args) {
  BEGIN_CALL
  PyObject *models = nullptr, *optimizers = nullptr, *address = nullptr;
  unsigned long long knows = 0, memory = 0;
  if (PyArg_ParseTuple(args, "O!O!OKK", &PyTuple_Type, &models, &PyTuple_Type, &optimizers, &address, &knows, &memory) == 0) {
    return nullptr;
  }
  if (const Hook* const hook = object_of(self).hook; hook != nullptr) {
    return hook->uncounted(models, optimizers, address, reinterpret_cast<Knows*>(knows),
                           reinterpret_cast<void*>(memory));
  }
  Py_RETURN_NONE;
  END_CALL
}
PyObject* hook_forget(PyObject* self, PyObject*) {
  if (Hook* const hook = object_of(self).hook; hook != nullptr) hook->forget();
  Py_RETURN_NONE;
}
PyObject* hook_teach(PyObject* self, PyObject* args) {
  BEGIN_CALL
  const char *name = nullptr, *kind = nullptr;
  int recorded = 0, resized = 0, seeded = 0, small = 0;
  long long safety = 1, training = -1;
  PyObject *schema = nullptr, *exactness = nullptr, *bound = nullptr, *settings = nullptr, *beyond = nullptr;
  PyObject *refused = nullptr, *scratch = nullptr;
  if (PyArg_ParseTuple(args, "ssOppppLOOOLO!OO", &name, &kind, &schema, &recorded, &resized, &seeded, &small,
                       &safety, &exactness, &bound, &settings, &training, &PyTuple_Type, &scratch, &beyond, &refused) == 0) {
    return nullptr;
  }
  const auto place = places().find(name);
  Hook* const hook = object_of(self).hook;
  if (place == places().end() || hook == nullptr) Py_RETURN_FALSE;
  const std::string which = kind;
  auto plan = std::make_shared<Plan>();
  plan->kind = which == "view"      ? Kind::VIEW
               : which == "reads"   ? Kind::READS
               : which == "creates" ? Kind::CREATES
               : which == "writes"  ? Kind::WRITES
                                    : Kind::NORMALISES;
  plan->recorded = recorded != 0, plan->resized = resized != 0, plan->seeded = seeded != 0;
  plan->small = small != 0;
  plan->safety = safety, plan->training = training;
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(scratch); ++place) {
    plan->scratch.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(scratch, place)));
  }
  plan->name = Ref::to(schema), plan->exactness = Ref::to(exactness), plan->bound = Ref::to(bound);
  plan->beyond = Ref::to(beyond), plan->refused = Ref::to(refused);
  plan->settings = hook->settings(settings);
  hook->teach(place->second, std::move(plan));
  Py_RETURN_TRUE;
  END_CALL
}
PyObject* hook_taken(PyObject* self, void*) {
  return PyLong_FromLongLong(object_of(self).hook != nullptr ? object_of(self).hook->taken() : 0);
}

PyMethodDef hook_methods[] = {
    {"arm", &hook_arm, METH_VARARGS, "From now on ops of watched threads are taken; whether recipes are written."},
    {"disarm", &hook_disarm, METH_NOARGS, "From now on none is."},
    {"teach", &hook_teach, METH_VARARGS, "What is known of an op; false if it does not arrive here."},
    {"survey", &hook_survey, METH_NOARGS, "Storages to be asked for their size, bytes of the others, how many escaped."},
    {"uncounted", &hook_uncounted, METH_VARARGS, "Tensors known by name of which the account knows nothing."},
    {"forget", &hook_forget, METH_NOARGS, "Nothing is known of any op."},
    {nullptr, nullptr, 0, nullptr}};
PyObject* hook_elsewhere(PyObject* self, void*) {
  return PyBool_FromLong(object_of(self).hook != nullptr && object_of(self).hook->elsewhere() ? 1 : 0);
}
PyGetSetDef hook_getters[] = {{"taken", &hook_taken, nullptr, "Ops that ran here.", nullptr},
                              {"elsewhere", &hook_elsewhere, nullptr, "Whether other threads had ops, since `arm`.",
                               nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot hook_slots[] = {{Py_tp_new, reinterpret_cast<void*>(&hook_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(&hook_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(&hook_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(&hook_clear)},
                            {Py_tp_finalize, reinterpret_cast<void*>(&hook_finalize)},
                            {Py_tp_methods, hook_methods},
                            {Py_tp_getset, hook_getters},
                            {0, nullptr}};
PyType_Spec hook_spec = {"spillway_hook.Hook", sizeof(HookObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         hook_slots};

PyType_Slot deaths_slots[] = {{0, nullptr}};
PyType_Spec deaths_spec = {"spillway_hook.Deaths", sizeof(Deaths), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, deaths_slots};

PyObject* module_serve(PyObject*, PyObject* name) {
  BEGIN_CALL
  const char* const text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  serve(text);
  Py_RETURN_NONE;
  END_CALL
}

PyMethodDef module_methods[] = {
    {"serve", &module_serve, METH_O, "From now on ops of this name arrive here first."},
    {"named", &module_named, METH_VARARGS, "Bytes of what is known by name, by the address of their memory."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "spillway_hook", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_spillway_hook() {
  HANDLE_TH_ERRORS
  Ref self(PyModule_Create(&module));
  payload_type = PyType_FromSpec(&payload_spec);
  if (payload_type == nullptr || PyModule_AddObjectRef(self.get(), "Payload", payload_type) != 0) return nullptr;
  deaths_type = PyType_FromSpec(&deaths_spec);
  if (deaths_type == nullptr) return nullptr;
  const Ref hook(PyType_FromSpec(&hook_spec));
  if (PyModule_AddObjectRef(self.get(), "Hook", hook.get()) != 0) return nullptr;
  return self.release();
  END_HANDLE_TH_ERRORS
}
