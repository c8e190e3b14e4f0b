#include <zero/optim/runs.h>

namespace zero::optim {

std::vector<Run> runs_of(
    const sharding::ParameterTable& table,
    int64_t bucket,
    layout::Range held,
    const std::function<int64_t(int64_t parameter)>& key) {
  const layout::Bucket& shape = table.bucket(bucket).layout;
  std::vector<Run> runs;
  for (size_t i = 0; i < shape.parameters.size(); ++i) {
    const int64_t value = key(shape.parameters[i]);
    const int64_t begin = table.entry(shape.parameters[i]).slot.offset;
    const int64_t end = i + 1 < shape.parameters.size()
        ? table.entry(shape.parameters[i + 1]).slot.offset
        : shape.numel;
    const layout::Range range = layout::intersect({begin, end}, held);
    if (value < 0 || range.size() == 0) {
      continue;
    }
    if (!runs.empty() && runs.back().key == value && runs.back().range.end == range.begin) {
      runs.back().range.end = range.end;
    } else {
      runs.push_back({range, value});
    }
  }
  return runs;
}

} // namespace zero::optim
