#include <zero/checkpoint/plan.h>

#include <algorithm>

#include <c10/util/Exception.h>

namespace zero::checkpoint {

ReadPlan
plan_reads(const ManifestTensor& tensor, layout::Range wanted, const std::vector<int64_t>& order) {
  const int64_t numel = tensor.numel();
  TORCH_CHECK_VALUE(
      wanted.begin >= 0 && wanted.begin <= wanted.end && wanted.end <= numel,
      "[zero.checkpoint] expected a range of the ",
      numel,
      " elements of '",
      tensor.name,
      "', got [",
      wanted.begin,
      ", ",
      wanted.end,
      ")");
  ReadPlan plan;
  if (wanted.size() > 0 && !same_order(tensor.shape, tensor.order, order)) {
    plan.whole = true;
    plan.reordering = {
        .shape = tensor.shape,
        .from = tensor.order,
        .to = order,
        .itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype))};
    wanted = {0, numel};
  }
  for (size_t i = 0; i < tensor.pieces.size(); ++i) {
    const Piece& piece = tensor.pieces[i];
    const layout::Range part = layout::intersect({piece.begin, piece.end()}, wanted);
    if (part.size() > 0) {
      plan.reads.push_back(
          {.file = piece.file,
           .piece = static_cast<int64_t>(i),
           .key = piece_key(tensor.name, piece.begin, piece.count),
           .offset = part.begin - piece.begin,
           .count = part.size(),
           .destination = part.begin - wanted.begin});
    }
  }
  sort_reads(plan.reads);
  return plan;
}

void sort_reads(std::vector<PieceRead>& reads) {
  std::stable_sort(reads.begin(), reads.end(), [](const PieceRead& a, const PieceRead& b) {
    return a.file < b.file;
  });
}

} // namespace zero::checkpoint
