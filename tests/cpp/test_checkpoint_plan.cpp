// Plans of reads against brute force, permutations against torch's.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "checkpoint_files.h"

#include <ATen/ATen.h>

#include <zero/checkpoint/permute.h>
#include <zero/checkpoint/plan.h>

using namespace zero::checkpoint;
using namespace zero::test;
using zero::layout::Range;

namespace {

std::vector<int64_t> random_order(std::mt19937& random, size_t dims) {
  std::vector<int64_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

std::vector<int64_t> random_shape(std::mt19937& random) {
  std::vector<int64_t> shape(below(random, 5));
  for (int64_t& size : shape) {
    size = static_cast<int64_t>(below(random, 6));
  }
  return shape;
}

Range random_range(std::mt19937& random, int64_t numel) {
  const auto begin = static_cast<int64_t>(below(random, numel + 1));
  return {begin, begin + static_cast<int64_t>(below(random, numel - begin + 1))};
}

// Covers the tensor, cut at random, in files at random.
std::vector<Piece> random_pieces(std::mt19937& random, int64_t numel, size_t files) {
  std::vector<Piece> pieces;
  for (int64_t begin = 0; begin < numel;) {
    const auto count = static_cast<int64_t>(1 + below(random, numel - begin));
    pieces.push_back({static_cast<int64_t>(below(random, files)), begin, count, 0});
    begin += count;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

// The elements of a tensor in the order of its memory, dimensions as in `order`.
at::Tensor in_order(const at::Tensor& whole, const std::vector<int64_t>& order) {
  return order.empty() ? whole.contiguous().flatten() : whole.permute(order).contiguous().flatten();
}

} // namespace

TEST_CASE("a plan fills a range with its elements, and reads no others") {
  std::mt19937 random(6);
  for (int round = 0; round < 2000; ++round) {
    const auto numel = static_cast<int64_t>(below(random, 60));
    ManifestTensor tensor{.name = "w", .shape = {numel}};
    tensor.pieces = random_pieces(random, numel, 4);
    const Range wanted = random_range(random, numel);
    const ReadPlan plan = plan_reads(tensor, wanted);
    REQUIRE_FALSE(plan.whole);
    std::vector<int64_t> filled(wanted.size(), -1);
    for (const PieceRead& read : plan.reads) {
      const auto piece =
          std::find_if(tensor.pieces.begin(), tensor.pieces.end(), [&](const Piece& candidate) {
            return read.key ==
                "w[" + std::to_string(candidate.begin) + ":" + std::to_string(candidate.end()) +
                "]";
          });
      REQUIRE(piece != tensor.pieces.end());
      REQUIRE(piece->file == read.file);
      REQUIRE(piece - tensor.pieces.begin() == read.piece);
      REQUIRE(read.count > 0);
      REQUIRE((read.offset >= 0 && read.offset + read.count <= piece->count));
      for (int64_t i = 0; i < read.count; ++i) {
        REQUIRE(filled.at(read.destination + i) == -1);
        filled[read.destination + i] = piece->begin + read.offset + i;
      }
    }
    for (int64_t i = 0; i < wanted.size(); ++i) {
      REQUIRE(filled[i] == wanted.begin + i);
    }
    REQUIRE(
        std::is_sorted(
            plan.reads.begin(), plan.reads.end(), [](const PieceRead& a, const PieceRead& b) {
              return a.file < b.file;
            }));
  }
}

TEST_CASE("a plan reads the whole tensor only where the orders differ") {
  ManifestTensor tensor{.name = "w", .shape = {2, 3}, .pieces = {{0, 0, 4, 0}, {1, 4, 2, 0}}};
  REQUIRE_FALSE(plan_reads(tensor, {1, 3}, {0, 1}).whole);
  const ReadPlan plan = plan_reads(tensor, {1, 3}, {1, 0});
  REQUIRE(plan.whole);
  REQUIRE(
      (plan.reads == std::vector<PieceRead>{{0, 0, "w[0:4]", 0, 4, 0}, {1, 1, "w[4:6]", 0, 2, 4}}));
  REQUIRE_FALSE(plan_reads(tensor, {3, 3}, {1, 0}).whole);
  REQUIRE(plan_reads(tensor, {3, 3}, {1, 0}).reads.empty());
  tensor.order = {1, 0};
  REQUIRE(plan_reads(tensor, {1, 3}).whole);
  REQUIRE_FALSE(plan_reads(tensor, {1, 3}, {1, 0}).whole);
  for (const Range wrong : {Range{0, 7}, Range{-1, 2}, Range{4, 3}}) {
    require_error("6 elements of 'w'", [&] { plan_reads(tensor, wrong); });
  }
  require_error("permutation of 2", [&] { plan_reads(tensor, {0, 1}, {0, 0}); });
}

TEST_CASE("permuted elements are those of torch") {
  std::mt19937 random(7);
  for (int round = 0; round < 1000; ++round) {
    const std::vector<int64_t> shape = random_shape(random);
    const auto dtype = std::vector{
        at::kByte, at::kShort, at::kInt, at::kDouble, at::kComplexDouble}[below(random, 5)];
    at::Tensor whole =
        at::arange(c10::multiply_integers(shape), at::kLong).reshape(shape).to(dtype);
    const auto from =
        below(random, 4) == 0 ? std::vector<int64_t>{} : random_order(random, shape.size());
    const auto to =
        below(random, 4) == 0 ? std::vector<int64_t>{} : random_order(random, shape.size());
    const at::Tensor source = in_order(whole, from);
    const at::Tensor expected = in_order(whole, to);
    const Range wanted = random_range(random, whole.numel());
    const at::Tensor found = at::empty({wanted.size()}, dtype);
    permute_elements(
        {shape, from, to, static_cast<int64_t>(whole.itemsize())},
        source.data_ptr(),
        wanted,
        found.data_ptr());
    REQUIRE(at::equal(found, expected.narrow(0, wanted.begin, wanted.size())));
    REQUIRE(same_order(shape, from, from));
    // Equal orders put each element at the same place; most others don't.
    if (same_order(shape, from, to)) {
      REQUIRE(at::equal(source, expected));
    } else if (whole.numel() < 256) {
      REQUIRE_FALSE(at::equal(source, expected));
    }
  }
  require_error("range of 6", [] {
    permute_elements({.shape = {2, 3}, .to = {1, 0}}, nullptr, {0, 7}, nullptr);
  });
  require_error("permutation", [] {
    permute_elements({.shape = {2, 3}, .to = {1}}, nullptr, {0, 0}, nullptr);
  });
}

TEST_CASE("the order of a dense tensor is read off its strides") {
  std::mt19937 random(8);
  for (int round = 0; round < 1000; ++round) {
    const std::vector<int64_t> shape = random_shape(random);
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
      continue;
    }
    const auto order = random_order(random, shape.size());
    // A tensor of this shape that lies in memory in this order.
    std::vector<int64_t> sizes;
    std::vector<int64_t> inverse(shape.size());
    for (size_t i = 0; i < order.size(); ++i) {
      sizes.push_back(shape[order[i]]);
      inverse[order[i]] = static_cast<int64_t>(i);
    }
    const at::Tensor tensor =
        at::arange(c10::multiply_integers(shape)).reshape(sizes).permute(inverse);
    REQUIRE(tensor.sizes() == at::IntArrayRef(shape));
    const auto found = memory_order(shape, tensor.strides().vec());
    REQUIRE(same_order(shape, found, order));
    REQUIRE(at::equal(in_order(tensor, found), at::arange(tensor.numel())));
    REQUIRE(found.empty() == tensor.is_contiguous());
  }
  REQUIRE(
      memory_order({2, 3, 4, 5}, {60, 1, 15, 3}) ==
      std::vector<int64_t>{0, 2, 3, 1}); // channels last
  REQUIRE(memory_order({}, {}).empty());
  REQUIRE(same_order({2, 1, 3}, {0, 1, 2}, {1, 0, 2}));
  REQUIRE_FALSE(same_order({2, 1, 3}, {0, 1, 2}, {2, 0, 1}));
}
