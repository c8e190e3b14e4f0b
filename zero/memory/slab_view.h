#pragma once

// A storage whose bytes lie in a larger slab. The StorageImpl stays the same for
// its whole life while its pointer comes and goes: closed, it has no data, and
// whatever reads it without going through the on-use guard gets a named error.
// The slab lives as long as an open view of it.

#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include <zero/api.h>

namespace zero::memory {

// Who answers for a view when an operation is about to touch it. Called from any
// thread, in any mode. Failures are left in the view's message, which the
// operation then raises.
class OnUse {
 public:
  // A closed view is going to be read. False: bringing it back failed, and the
  // operation is going to say so.
  virtual bool before_use(const char* operation) noexcept = 0;
  // A closed view is going to be viewed, or asked for its shape.
  virtual void before_view(const char* operation) noexcept {
    before_use(operation);
  }
  // An open view is going to be read: often, so quickly.
  virtual void while_open() noexcept {}
  // A view, closed or open, is going to be written.
  virtual void before_write(const c10::StorageImpl* storage, const char* operation) noexcept {
    static_cast<void>(storage);
    before_use(operation);
  }
  // Around the other calls for one operation, to everyone whose views it reads:
  // what is open stays so.
  virtual void pin() noexcept {}
  virtual void unpin() noexcept {}

 protected:
  ~OnUse() = default;
};

class SlabView {
 public:
  // A slab that views are going to look into, who keep it from then on, and who is told
  // of writes to them.
  class Source {
   public:
    explicit Source(const at::Tensor& slab, OnUse* on_use = nullptr);
    ~Source();
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    c10::DataPtr at(int64_t offset) const;

   private:
    friend class SlabView;
    struct Hold;
    static void drop(void* hold);
    Hold* hold_;
  };

  SlabView() = default;
  SlabView(SlabView&&) noexcept = default;
  SlabView& operator=(SlabView&& other) noexcept;
  SlabView(const SlabView&) = delete;
  SlabView& operator=(const SlabView&) = delete;
  // A closed view that still has its bytes opens again.
  ~SlabView();

  // Moves the bytes of a dense tensor into the slab at an element offset. The
  // tensor keeps its identity, shape and strides; so does its storage where it
  // belongs to this tensor alone (`own_storage`), so that aliases stay right.
  static SlabView
  adopt(at::Tensor& tensor, const at::Tensor& slab, int64_t offset, bool own_storage);

  // A new tensor of that shape, without data until point_to(); not a view for
  // autograd.
  static std::pair<at::Tensor, SlabView>
  make(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options);

  // Gives a tensor the slab's dtype and elements from `offset` on, in a storage of
  // its own. What it held is let go.
  static SlabView replace(at::Tensor& tensor, const at::Tensor& slab, int64_t offset);

  // Opens on elements of a slab from `offset` on. `on_use` is told of writes.
  void point_to(const at::Tensor& slab, int64_t offset, OnUse* on_use = nullptr);
  void point_to(const Source& source, int64_t offset);
  // Takes the data away; open() brings it back. `on_use` may be null.
  void close(std::string message, OnUse* on_use);
  void open();
  // Takes the data away for good: the slab is let go. point_to() brings other data.
  void release(std::string message, OnUse* on_use = nullptr);
  // Replaces the message of a closed view.
  void set_message(std::string message);

  // Whether somebody outside torch (an array) took the memory since the last call:
  // it must not be used for anything else then.
  bool take_lent();

  bool closed() const {
    return closed_;
  }
  // Whether the tensor still uses this storage.
  bool holds(const at::Tensor& tensor) const;
  bool is(const c10::StorageImpl* storage) const;
  // Copies the values of a tensor that was moved to other storage back into the
  // slab, and the tensor with them. Shape and dtype must be those of adopt().
  void take_back(at::Tensor& tensor, const at::Tensor& slab, int64_t offset);
  // Only the tensor.
  void take_back(at::Tensor& tensor);

  // Who answers for the storage of a tensor, and whether it is closed. Null for
  // storages that are not ours or that nobody answers for.
  struct Keeper {
    OnUse* on_use = nullptr;
    bool closed = false;
  };
  static Keeper keeper_of(const at::Tensor& tensor) noexcept;

 private:
  c10::Storage storage_;
  c10::DataPtr parked_;
  bool closed_ = false;
};

} // namespace zero::memory
