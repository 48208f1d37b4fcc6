// GPUs that a CPU build of torch believes in: tensors on "cuda:N" whose memory is the host's, and whose operators are
// the CPU's. Operands on different devices are refused; each wait of the host is reported; a copy that does not wait
// ends with the next wait, and until then its target holds rubbish.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {
using namespace c10;
using at::Tensor;
using Stack = torch::jit::Stack;

int count = 1;
thread_local DeviceIndex current = 0;
void (*report)(const char*) = nullptr;
std::recursive_mutex turn;

struct Copy {
  Tensor into; // on the host; undefined for a copy to the device
  std::function<void()> finish;
};
std::vector<Copy> unfinished;

void finish_copies() {
  std::lock_guard<std::recursive_mutex> lock(turn);
  auto copies = std::move(unfinished);
  unfinished.clear();
  for (auto& copy : copies) copy.finish();
}

void wait_for_device(const char* cause) {
  if (report) report(cause);
  finish_copies();
}

// --- memory ---

void* aligned(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 512, bytes ? bytes : 1) == 0, "CUDA out of memory (stand-in)");
  return memory;
}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? aligned(bytes) : nullptr;
    return {memory, memory, &std::free, Device(DeviceType::CUDA, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* into, const void* from, size_t bytes) const override { std::memcpy(into, from, bytes); }
} device_memory;

std::map<const char*, size_t> pinned;

void unpin(void* memory) {
  std::lock_guard<std::recursive_mutex> lock(turn);
  pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
}

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(turn);
    void* memory = aligned(bytes);
    pinned[static_cast<const char*>(memory)] = bytes ? bytes : 1;
    return {memory, memory, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* into, const void* from, size_t bytes) const override { std::memcpy(into, from, bytes); }
} pinned_memory;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::recursive_mutex> lock(turn);
  auto at = pinned.upper_bound(static_cast<const char*>(pointer));
  return at != pinned.begin() && (--at, static_cast<const char*>(pointer) < at->first + at->second);
}

// --- the same memory as a tensor of the host, and back ---

void release(void* storage) { delete static_cast<Storage*>(storage); }

Tensor over(const Tensor& like, const Storage& memory, Device device, Allocator* allocator) {
  void* start = const_cast<void*>(memory.data());
  Storage storage(Storage::use_byte_size_t(), memory.nbytes(),
                  DataPtr(start, new Storage(memory), &release, device), allocator, true);
  auto key = device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  Tensor made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

Tensor host(const Tensor& tensor) { return over(tensor, tensor.storage(), Device(DeviceType::CPU), GetCPUAllocator()); }

// --- operators: the CPU's ---

std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> of_devices;
    for (int i = 0; i < 64; i++) of_devices.push_back(at::make_generator<at::CPUGeneratorImpl>(0xC0DA + getpid() * 64 + i));
    return of_devices;
  }();
  return made;
}

const std::set<std::string> waiting = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::_unique2",
                                       "aten::masked_select", "aten::bincount", "aten::repeat_interleave",
                                       "aten::unique_dim", "aten::unique_consecutive"};
const std::set<std::string> indexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

struct Operands {
  const std::string& name;
  std::vector<std::pair<Tensor, Tensor>> both{}; // on the device, on the host
  bool of_host = false, masks = false;

  Tensor move(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      of_host = of_host || tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(both.empty() || both[0].first.device() == tensor.device(), "Expected all tensors to be on the same device, but found ",
                both[0].first.device(), " and ", tensor.device(), " in ", name, " (stand-in)");
    masks = masks || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    for (auto& [device, there] : both)
      if (device.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return there;
    both.emplace_back(tensor, host(tensor));
    return both.back().second;
  }

  Tensor move_back(const Tensor& tensor, Device device) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [there, here] : both) {
      if (here.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return there;
      if (here.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        Tensor view = at::detail::make_tensor<TensorImpl>(Storage(there.storage()), there.key_set(), tensor.dtype());
        view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
        return view;
      }
    }
    return over(tensor, tensor.storage(), device, &device_memory);
  }
};

void map_tensors(IValue& value, const std::function<Tensor(const Tensor&)>& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = function(tensor);
    value = c10::List<Tensor>(list);
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorVector();
    for (auto& tensor : list)
      if (tensor.has_value()) tensor = function(*tensor);
    value = c10::List<std::optional<Tensor>>(list);
  }
}

void on_host(const OperatorHandle& op, Stack* stack) {
  const auto& name = op.schema().name();
  const size_t first = stack->size() - op.schema().arguments().size();
  Operands operands{name};
  Device device(DeviceType::CUDA, current);
  for (size_t i = first; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    map_tensors(value, [&](const Tensor& tensor) { return operands.move(tensor); });
    if (value.isDevice()) {
      if (value.toDevice().has_index()) device = value.toDevice();
      value = Device(DeviceType::CPU);
    }
  }
  if (!operands.both.empty()) device = operands.both[0].first.device();
  const bool indexes = indexing.count(name) > 0;
  TORCH_CHECK(indexes || !operands.of_host || operands.both.empty(),
              "Expected all tensors to be on the same device, but found ", device, " and cpu in ", name, " (stand-in)");
  const bool sized = name == "aten::repeat_interleave" && !stack->back().isNone();
  if ((waiting.count(name) && !sized) || (indexes && (operands.masks || operands.of_host))) wait_for_device(name.c_str());
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  Tensor hosts_state;
  auto hosts = at::detail::getDefaultCPUGenerator();
  auto& devices = generators()[device.index()];
  if (draws) {
    hosts_state = hosts.get_state();
    hosts.set_state(devices.get_state());
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  if (draws) {
    devices.set_state(hosts.get_state());
    hosts.set_state(hosts_state);
  }
  for (auto& [there, here] : operands.both) // a target that was resized
    if (here.sizes() != there.sizes()) {
      at::native::resize_(there, here.sizes());
      host(there).copy_(here);
    }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    map_tensors((*stack)[i], [&](const Tensor& tensor) { return operands.move_back(tensor, device); });
}

// --- what allocates, what copies ---

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_default(device));
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool to_device = self.is_cuda(), from_device = source.is_cuda();
  Tensor into = to_device ? host(self) : self, from = from_device ? host(source) : source;
  if (to_device == from_device) {
    into.copy_(from);
  } else if (!non_blocking || !is_pinned((to_device ? from : into).const_data_ptr())) {
    into.copy_(from);
    if (into.numel()) wait_for_device(to_device ? "copy to the device" : "copy to the host");
  } else if (to_device) {
    std::lock_guard<std::recursive_mutex> lock(turn);
    for (auto& before : unfinished) // in the order of the stream
      if (before.into.defined() && before.into.storage().unsafeGetStorageImpl() == from.storage().unsafeGetStorageImpl()) before.finish();
    into.copy_(from);
    unfinished.push_back({Tensor(), [from, before = from.clone()] {
      TORCH_CHECK(std::memcmp(from.contiguous().const_data_ptr(), before.contiguous().const_data_ptr(), before.nbytes()) == 0,
                  "pinned memory was overwritten before it was copied to the device (stand-in)");
    }});
  } else {
    std::lock_guard<std::recursive_mutex> lock(turn);
    unfinished.push_back({into, [into, value = from.clone()]() mutable { into.copy_(value); }});
    if (into.is_contiguous()) std::memset(into.mutable_data_ptr(), 0xA5, into.nbytes());
  }
  return self;
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("resize_", &resize);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &at::native::set_cpu_);
  // Else torch would build these from other operators, or choose the kernel by the device.
  auto& dispatcher = Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    const bool chosen = name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    if (op && name.name.rfind("aten::", 0) == 0 && !op->hasKernelForDispatchKey(DispatchKey::CUDA) &&
        (chosen || op->hasKernelForDispatchKey(DispatchKey::CPU)))
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
}

TORCH_LIBRARY(stand_in, library) {
  library.def("host(Tensor(a) tensor) -> Tensor(a)", &host);
  library.def("rng_state(int device) -> Tensor", [](int64_t device) { return generators()[device].get_state(); });
  library.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) { generators()[device].set_state(state); });
}

// --- what torch asks about its devices ---

struct Guard final : public impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::CUDA, current);
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  Stream stream(Device device) const { return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice()); }
  Stream getStream(Device device) const noexcept override { return stream(device); }
  Stream getNewStream(Device device, int) const override { return stream(device); }
  Stream exchangeStream(Stream other) const noexcept override { return stream(other.device()); }
  DeviceIndex deviceCount() const noexcept override { return count; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for_device("Stream.synchronize"); }
  void synchronizeEvent(void*) const override { wait_for_device("Event.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for_device("synchronize"); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
} guard;

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return generators()[index < 0 ? current : index]; }
  DeviceIndex deviceCount() const override { return count; }
  int getNumGPUs() const override { return count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { auto before = current; current = device; return before; }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_device("synchronize"); }
};

struct Registration {
  Registration() {
    impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
    SetAllocator(DeviceType::CUDA, &device_memory, 100);
    // torch has made its hooks, which have no data, when it was imported: they get these functions.
    static Hooks hooks;
    auto& made = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
    std::memcpy(static_cast<void*>(&made), static_cast<void*>(&hooks), sizeof(void*));
  }
} registration;
} // namespace

namespace at::native {
RegisterCUDADispatch<decltype(_fused_sdp_choice_stub)> attention(_fused_sdp_choice_stub, &math_attention);
}

extern "C" {
void stand_in_open(int devices, void (*on_wait)(const char*)) { count = devices; report = on_wait; }
void stand_in_close() { report = nullptr; }
int stand_in_current() { return current; }
void stand_in_set(int device) { current = device; }
void stand_in_seed(int device, uint64_t seed) { generators()[device].set_current_seed(seed); }
const char* stand_in_wait(const char* cause) { // returns an error
  static thread_local std::string error;
  try {
    wait_for_device(cause);
    return nullptr;
  } catch (const Error& raised) {
    error = raised.what_without_backtrace();
    return error.c_str();
  }
}
void stand_in_resize(void* storage, size_t bytes) { at::native::resize_bytes_cpu(static_cast<StorageImpl*>(storage), bytes); }
}
