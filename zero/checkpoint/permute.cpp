#include <zero/checkpoint/permute.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

namespace zero::checkpoint {

namespace {

std::vector<int64_t> full_order(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& order) {
  std::vector<int64_t> row_major(shape.size());
  std::iota(row_major.begin(), row_major.end(), 0);
  if (order.empty()) {
    return row_major;
  }
  TORCH_CHECK_VALUE(
      std::is_permutation(order.begin(), order.end(), row_major.begin(), row_major.end()),
      "[zero.checkpoint] expected a permutation of ",
      shape.size(),
      " dimensions, got ",
      c10::IntArrayRef(order));
  return order;
}

// In elements, by dimension.
std::vector<int64_t> strides_of(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& order) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= shape[order[i]];
  }
  return strides;
}

template <int64_t itemsize>
void copy_strided(const char* source, int64_t stride, int64_t count, char* destination) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(destination + i * itemsize, source + i * stride * itemsize, itemsize);
  }
}

// `count` elements, `stride` elements apart.
void copy_elements(
    const char* source,
    int64_t stride,
    int64_t count,
    int64_t itemsize,
    char* destination) {
  if (stride == 1) {
    std::memcpy(destination, source, count * itemsize);
    return;
  }
  switch (itemsize) {
  case 1:
    return copy_strided<1>(source, stride, count, destination);
  case 2:
    return copy_strided<2>(source, stride, count, destination);
  case 4:
    return copy_strided<4>(source, stride, count, destination);
  case 8:
    return copy_strided<8>(source, stride, count, destination);
  case 16:
    return copy_strided<16>(source, stride, count, destination);
  default:
    TORCH_CHECK_VALUE(
        false, "[zero.checkpoint] expected elements of 1, 2, 4, 8 or 16 bytes, got ", itemsize);
  }
}

} // namespace

std::vector<int64_t> memory_order(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& strides) {
  TORCH_CHECK_VALUE(
      shape.size() == strides.size(), "[zero.checkpoint] expected a stride for each dimension");
  std::vector<int64_t> places; // of the dimensions that matter
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] > 1) {
      places.push_back(static_cast<int64_t>(i));
    }
  }
  std::vector<int64_t> sorted = places;
  std::stable_sort(
      sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  if (sorted == places) {
    return {};
  }
  std::vector<int64_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = 0; i < places.size(); ++i) {
    order[places[i]] = sorted[i];
  }
  return order;
}

bool same_order(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b) {
  const auto without_ones = [&](const std::vector<int64_t>& order) {
    std::vector<int64_t> dims = full_order(shape, order);
    std::erase_if(dims, [&](int64_t dim) { return shape[dim] == 1; });
    return dims;
  };
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  return without_ones(a) == without_ones(b) || empty;
}

void permute_elements(
    const Reordering& reordering,
    const void* source,
    layout::Range wanted,
    void* destination) {
  const auto& shape = reordering.shape;
  const int64_t itemsize = reordering.itemsize;
  const std::vector<int64_t> to = full_order(shape, reordering.to);
  const std::vector<int64_t> strides = strides_of(shape, full_order(shape, reordering.from));
  const int64_t numel =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  TORCH_CHECK_VALUE(
      wanted.begin >= 0 && wanted.begin <= wanted.end && wanted.end <= numel,
      "[zero.checkpoint] expected a range of ",
      numel,
      " elements, got [",
      wanted.begin,
      ", ",
      wanted.end,
      ")");
  const auto* from = static_cast<const char*>(source);
  auto* out = static_cast<char*>(destination);
  if (wanted.size() == 0) {
    return;
  }
  if (to.empty()) {
    std::memcpy(out, from, itemsize);
    return;
  }

  // Where the first element is: its index in each dimension, fastest last.
  std::vector<int64_t> index(to.size());
  int64_t left = wanted.begin;
  int64_t at = 0;
  for (size_t i = to.size(); i-- > 0;) {
    index[i] = left % shape[to[i]];
    left /= shape[to[i]];
    at += index[i] * strides[to[i]];
  }
  const size_t fastest = to.size() - 1;
  for (int64_t done = wanted.begin; done < wanted.end;) {
    const int64_t run = std::min(shape[to[fastest]] - index[fastest], wanted.end - done);
    const int64_t stride = strides[to[fastest]];
    copy_elements(from + at * itemsize, stride, run, itemsize, out);
    out += run * itemsize;
    done += run;
    index[fastest] += run;
    at += run * stride;
    for (size_t i = fastest; i > 0 && index[i] == shape[to[i]]; --i) {
      at += strides[to[i - 1]] - index[i] * strides[to[i]];
      index[i] = 0;
      ++index[i - 1];
    }
  }
}

} // namespace zero::checkpoint
