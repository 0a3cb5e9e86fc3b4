#include "dlpack_view.h"

#include <atomic>
#include <memory>

#include "torch_api.h"

namespace jax_mxfp4_moe {

struct ViewBlock {
  struct Slot {
    union {
      DLManagedTensorVersioned versioned;
      DLManagedTensor legacy;  // capsules: every torch takes them
    };
    ViewBlock* block = nullptr;
    std::atomic<bool> alive{false};

    Slot() : versioned{} {}
  };

  std::unique_ptr<Slot[]> slots;
  std::atomic<int> references{0};
  PlanPtr kept_plan;  // set once a view has outlived its call: the structs point at the plan's dims and strides

  static void Drop(ViewBlock* block, int count = 1) {
    if (block->references.fetch_sub(count, std::memory_order_acq_rel) == count) delete block;
  }

  static void Release(void* slot_pointer) {  // any thread, with or without the interpreter lock
    auto* slot = static_cast<Slot*>(slot_pointer);
    slot->alive.store(false, std::memory_order_release);
    Drop(slot->block);
  }
};

void DeleteViewBlock(ViewBlock* block) { delete block; }

Views::Views(const PlanPtr& plan, DLDevice device) : plan_(plan), block_(plan->spare_views.exchange(nullptr)) {
  const size_t num_inputs = plan->inputs.size();
  const size_t size = num_inputs + plan->results.size();
  const bool versioned = torch_api.exchange != nullptr;
  if (block_ == nullptr) {
    auto fresh = std::make_unique<ViewBlock>();
    fresh->slots = std::make_unique<ViewBlock::Slot[]>(size);
    block_ = fresh.release();
  }
  own_ = static_cast<int>(size) + 1;
  block_->references.store(own_, std::memory_order_relaxed);  // all at once: nobody else knows the block yet
  for (size_t index = 0; index < size; ++index) {
    ViewBlock::Slot& slot = block_->slots[index];
    const BufferSpec& spec = index < num_inputs ? plan->inputs[index] : plan->results[index - num_inputs];
    slot.block = block_;
    DLTensor& tensor = versioned ? slot.versioned.dl_tensor : slot.legacy.dl_tensor;
    tensor.device = device;
    tensor.ndim = static_cast<int32_t>(spec.dims.size());
    tensor.dtype = spec.dtype->dlpack;
    tensor.shape = const_cast<int64_t*>(spec.dims.data());
    tensor.strides = const_cast<int64_t*>(spec.strides.data());
    tensor.byte_offset = 0;
  }
}

Views::~Views() {
  if (block_->references.load(std::memory_order_acquire) == own_) {
    DeleteViewBlock(plan_->spare_views.exchange(block_));
  } else {
    block_->kept_plan = plan_;
    ViewBlock::Drop(block_, own_);
  }
}

PyObject* Views::Make(size_t index, void* data) {
  ViewBlock::Slot& slot = block_->slots[index];
  const bool versioned = torch_api.exchange != nullptr;
  (versioned ? slot.versioned.dl_tensor : slot.legacy.dl_tensor).data = data;

  // From here on the consumer owns the struct. If the import fails it may or may not have run the deleter, so the
  // reference is never taken back: a leaked block on that path is better than a freed one (rule 2).
  slot.alive.store(true, std::memory_order_relaxed);
  --own_;
  if (versioned) {
    slot.versioned.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    slot.versioned.manager_ctx = &slot;
    slot.versioned.deleter = [](DLManagedTensorVersioned* self) { ViewBlock::Release(self->manager_ctx); };
    slot.versioned.flags = index < plan_->inputs.size() ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;  // rule 4
    void* object = nullptr;
    if (torch_api.exchange->managed_tensor_to_py_object_no_sync(&slot.versioned, &object) != 0) return nullptr;
    return static_cast<PyObject*>(object);
  }
  slot.legacy.manager_ctx = &slot;
  slot.legacy.deleter = [](DLManagedTensor* self) { ViewBlock::Release(self->manager_ctx); };
  PyObject* capsule = PyCapsule_New(&slot.legacy, "dltensor", nullptr);
  if (capsule == nullptr) return nullptr;
  PyObject* object = PyObject_CallOneArg(torch_api.from_dlpack, capsule);
  Py_DECREF(capsule);
  return object;
}

std::string Views::Retained() const {
  if (block_->references.load(std::memory_order_acquire) == own_) return "";
  std::string names;
  const size_t num_inputs = plan_->inputs.size();
  for (size_t index = 0; index < num_inputs + plan_->results.size(); ++index) {
    if (!block_->slots[index].alive.load(std::memory_order_acquire)) continue;
    if (!names.empty()) names += ", ";
    const size_t result = index - num_inputs;
    if (index < num_inputs) {
      names += "input " + std::to_string(index);
    } else if (plan_->has_workspace && result + 1 == plan_->results.size()) {
      names += "the workspace";
    } else {
      names += "output " + std::to_string(result);
    }
  }
  return names;
}

}  // namespace jax_mxfp4_moe
