// The device `strict` of the tests: a PrivateUse1 backend whose memory is the CPU's and whose kernels are the CPU's.
//
// It is stricter than a real card where that finds mistakes: tensors of two devices never meet, fp64 is refused unless it is allowed,
// autograd runs in a thread of the device, and whatever would make the host wait for a card is reported by name to
// `strict::synchronised`, which Python implements. Tensors are handed to the CPU's kernels without a copy.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr auto STRICT = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 2;
thread_local c10::DeviceIndex current = 0;
std::atomic<bool> has_double{false};
std::atomic<int64_t> launches{0};

void synchronised(const std::string& what) {
  static auto report = c10::Dispatcher::singleton().findSchemaOrThrow("strict::synchronised", "").typed<void(std::string)>();
  report.call(what);
}

bool is_strict(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == STRICT;
}

void check_type(c10::ScalarType type) {
  TORCH_CHECK_TYPE(
      has_double || (type != c10::kDouble && type != c10::kComplexDouble), "the strict device has no float64; compute on the CPU or in float32");
}

// ---- memory

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, c10::Device(STRICT, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &c10::free_cpu;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(STRICT, &memory)

std::mutex pinned_lock;
std::set<std::pair<const char*, const char*>> pinned_ranges;  // (end, start), so that upper_bound finds the range of an address

void free_pinned(void* data) {
  std::lock_guard<std::mutex> held(pinned_lock);
  for (auto range = pinned_ranges.begin(); range != pinned_ranges.end(); ++range) {
    if (range->second == data) {
      pinned_ranges.erase(range);
      break;
    }
  }
  c10::free_cpu(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = static_cast<char*>(c10::alloc_cpu(bytes ? bytes : 1));
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned_ranges.emplace(data + (bytes ? bytes : 1), data);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedMemory pinned_memory;

bool is_pinned_address(const void* data) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto found = pinned_ranges.upper_bound({static_cast<const char*>(data), static_cast<const char*>(data)});
  while (found != pinned_ranges.end() && found->first == data) ++found;
  return found != pinned_ranges.end() && found->second <= data;
}

// A storage that keeps another one alive, whose memory it is.
c10::Storage over(const c10::Storage& owner, c10::Device device, c10::Allocator* allocator) {
  auto* kept = new c10::Storage(owner);
  c10::DataPtr data(owner.mutable_data(), kept, [](void* context) { delete static_cast<c10::Storage*>(context); }, device);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), owner.nbytes(), std::move(data), allocator, /*resizable=*/true));
}

at::Tensor over_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  return is_strict(tensor) ? over_storage(tensor, over(tensor.storage(), c10::kCPU, c10::GetCPUAllocator()), c10::DispatchKey::CPU) : tensor;
}

// ---- the work of a stream: a copy to pinned memory is done when somebody waits for it, and not before

struct Pending {
  at::Tensor target, source;
};
std::mutex pending_lock;
std::vector<Pending> pending;

void finish_copies() {
  std::lock_guard<std::mutex> held(pending_lock);
  for (auto& copy : pending) copy.target.copy_(copy.source);
  pending.clear();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  if (is_strict(source) && !is_strict(target)) {
    if (non_blocking && is_pinned_address(target.const_data_ptr())) {
      std::memset(target.mutable_data_ptr(), 0xFF, target.is_contiguous() ? target.nbytes() : 0);
      std::lock_guard<std::mutex> held(pending_lock);
      pending.push_back({target, as_cpu(source).clone()});
      return target;
    }
    synchronised("copy to host");
  }
  TORCH_CHECK(!is_strict(source) || !is_strict(target) || source.device() == target.device(), "the strict device copies between no two cards");
  as_cpu(target).copy_(as_cpu(source));
  return target;
}

// ---- operators

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_type(c10::dtype_or_default(type));
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin) {
  check_type(c10::dtype_or_default(type));
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  synchronised("scalar");
  return at::_local_scalar_dense(as_cpu(tensor));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor&, c10::Stream) {}

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  const auto lent = mask ? std::optional<at::Tensor>(as_cpu(*mask)) : mask;
  return at::_fused_sdp_choice(as_cpu(query), as_cpu(key), as_cpu(value), lent, dropout, causal, scale, grouped);
}

// ---- everything else: the CPU's kernels

// Operators whose result has a shape that depends on values, or is a value: a card's host waits for them.
bool waits(const std::string& name, const torch::jit::Stack& arguments) {
  static const std::set<std::string> always{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
      "aten::bincount", "aten::repeat_interleave"};
  if (always.count(name)) return true;
  if (name != "aten::_index_put_impl_") return false;  // `index` calls `nonzero` on masks by itself
  for (const c10::IValue& index : arguments[1].toListRef()) {
    if (index.isTensor() && index.toTensor().defined() && index.toTensor().scalar_type() == c10::kBool) return true;
  }
  return false;
}

struct Call {
  const c10::OperatorHandle& op;
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> lent;  // (the device's, the CPU's)

  at::Tensor lend(const at::Tensor& tensor, bool listed) {
    if (!tensor.defined()) return tensor;
    if (!is_strict(tensor)) {
      const bool number = !listed && tensor.dim() == 0 && tensor.device().is_cpu();
      TORCH_CHECK(number, op.schema().name(), " was given a tensor on ", tensor.device(), " beside tensors on the strict device");
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), op.schema().name(), " was given tensors on ", *device, " and ", tensor.device());
    device = tensor.device();
    for (auto& [theirs, ours] : lent) {
      if (theirs.is_same(tensor)) return ours;
      if (theirs.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        lent.emplace_back(tensor, over_storage(tensor, ours.storage(), c10::DispatchKey::CPU));
        return lent.back().second;
      }
    }
    lent.emplace_back(tensor, as_cpu(tensor));
    return lent.back().second;
  }

  c10::IValue lend_value(const c10::IValue& value) {
    if (value.isTensor()) return lend(value.toTensor(), false);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lend(tensor, true));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(lend(*tensor, true)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == STRICT) {
      auto wanted = value.toDevice();
      device = c10::Device(STRICT, wanted.has_index() ? wanted.index() : current);
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  // An output that the kernel has resized lies in new memory.
  void write_back() {
    for (auto& [theirs, ours] : lent) {
      if (ours.storage().data() != theirs.storage().data()) {
        auto moved = over(ours.storage(), *device, &memory);
        auto* storage = theirs.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
        storage->set_nbytes(ours.storage().nbytes());
      }
      if (ours.sizes() != theirs.sizes() || ours.strides() != theirs.strides()) {
        theirs.unsafeGetTensorImpl()->set_sizes_and_strides(ours.sizes(), ours.strides(), ours.storage_offset());
      }
    }
  }

  at::Tensor give_back(const at::Tensor& result) {
    if (!result.defined() || !device) return result;
    for (auto& [theirs, ours] : lent) {
      if (ours.is_same(result)) return theirs;
      if (ours.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return over_storage(result, theirs.storage(), c10::DispatchKey::PrivateUse1);
      }
    }
    check_type(result.scalar_type());
    return over_storage(result, over(result.storage(), *device, &memory), c10::DispatchKey::PrivateUse1);
  }

  c10::IValue give_back_value(const c10::IValue& value) {
    if (value.isTensor()) return give_back(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(give_back(tensor));
    return list;
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op};
  const size_t count = op.schema().arguments().size();
  const size_t begin = stack->size() - count;
  torch::jit::Stack arguments(stack->begin() + begin, stack->end());
  if (waits(op.schema().name(), arguments)) synchronised(op.schema().name().substr(6));
  for (size_t place = 0; place < count; ++place) (*stack)[begin + place] = call.lend_value(arguments[place]);
  ++launches;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_back();
  for (size_t place = begin; place < stack->size(); ++place) (*stack)[place] = call.give_back_value((*stack)[place]);
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return STRICT;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(STRICT, current);
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(STRICT, device.has_index() ? device.index() : current));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    std::lock_guard<std::mutex> held(pending_lock);
    return pending.empty();
  }
  void synchronizeEvent(void*) const override {
    synchronised("event");
    finish_copies();
  }
  bool queryStream(const c10::Stream&) const override {
    return queryEvent(nullptr);
  }
  void synchronizeStream(const c10::Stream&) const override {
    synchronised("stream");
    finish_copies();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronised("device");
    finish_copies();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice(c10::Device(STRICT, index));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(c10::Device(STRICT, index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned_address(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

bool install() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}
const bool installed = install();

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

TORCH_LIBRARY(strict, library) {
  library.def("synchronised(str what) -> ()");
  library.def("allow_double(bool allowed) -> ()", [](bool allowed) { has_double = allowed; });
  library.def("launches() -> int", []() { return launches.load(); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  // torch has a formula for devices without a kernel; the CPU's kernel gives the CPU's bits.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
