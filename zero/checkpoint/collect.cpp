#include <zero/checkpoint/collect.h>

#include <algorithm>
#include <map>
#include <utility>

#include <zero/checkpoint/dtypes.h>
#include <zero/checkpoint/permute.h>

namespace zero::checkpoint {

std::string state_name(const std::string& parameter, const std::string& state) {
  return parameter + ":" + state;
}

std::pair<std::string, std::string> split_state_name(const std::string& name) {
  const size_t colon = name.rfind(':');
  return {name.substr(0, colon), name.substr(colon + 1)};
}

namespace {

ManifestTensor
describe(std::string name, const at::Tensor& like, c10::ScalarType dtype, TensorKind kind) {
  ManifestTensor tensor{.name = std::move(name), .dtype = dtype, .kind = kind};
  tensor.shape = like.sizes().vec();
  if (like.is_non_overlapping_and_dense()) {
    tensor.order = memory_order(tensor.shape, like.strides().vec());
  }
  return tensor;
}

void add(std::vector<Source>& sources, const std::string& name, int64_t begin, at::Tensor values) {
  OwnPiece piece{name, values.scalar_type(), begin, values.numel()};
  sources.push_back({std::move(piece), std::move(values)});
}

// What of a foreign state this rank writes: at stage 0, where all ranks have all of it,
// and with replicas, the same part as of the parameter.
at::Tensor own_part(
    const ForeignState& state,
    const std::map<int64_t, const StoredPart*>& values,
    int64_t held_begin) {
  const auto found = values.find(state.index);
  if (found == values.end()) {
    return {};
  }
  const StoredPart& part = *found->second;
  return state.values.narrow(0, part.begin - held_begin, part.values.numel());
}

// Names and dtypes of state, by parameter, of all ranks: some have no part of it.
using StateKinds = std::map<int64_t, std::map<std::string, c10::ScalarType>>;

StateKinds agree_on_state(const StateKinds& own, const Together& ranks) {
  std::string text;
  for (const auto& [index, states] : own) {
    for (const auto& [name, dtype] : states) {
      text += c10::str(index, " ", dtype_name(dtype, name), " ", name, "\n");
    }
  }
  StateKinds all = own;
  for (const std::string& theirs : ranks.run([&] { return text; })) {
    size_t at = 0;
    while (at < theirs.size()) {
      const size_t end = theirs.find('\n', at);
      const size_t first = theirs.find(' ', at);
      const size_t second = theirs.find(' ', first + 1);
      const auto dtype = dtype_named(theirs.substr(first + 1, second - first - 1));
      all[std::stoll(theirs.substr(at, first - at))].emplace(
          theirs.substr(second + 1, end - second - 1), dtype.value());
      at = end + 1;
    }
  }
  return all;
}

void collect_engine(const Contents& contents, const Together& ranks, Collected& collected) {
  Engine& engine = *contents.engine;
  const std::vector<StoredPart> parts = engine.own_parts();
  std::map<int64_t, const StoredPart*> values;
  StateKinds kinds;
  for (const StoredPart& part : parts) {
    if (part.state.empty()) {
      values[part.index] = &part;
      add(collected.parameters, engine.parameter(part.index).name, part.begin, part.values);
    } else if (contents.native_state) {
      kinds[part.index][part.state] = part.values.scalar_type();
      const std::string& name = engine.parameter(part.index).name;
      add(collected.state, state_name(name, part.state), part.begin, part.values);
    }
  }
  for (const ForeignState& state : contents.foreign) {
    kinds[state.index][state.name] = state.values.scalar_type();
    const at::Tensor own = own_part(state, values, engine.held_begin(state.index));
    if (own.defined()) {
      const std::string& name = engine.parameter(state.index).name;
      add(collected.state, state_name(name, state.name), values[state.index]->begin, own);
    }
  }
  kinds = agree_on_state(kinds, ranks);
  for (int64_t i = 0; i < engine.parameter_count(); ++i) {
    if (!engine.is_flat(i)) {
      continue;
    }
    const NamedParameter& parameter = engine.parameter(i);
    const auto dtype = engine.has_master(i) ? at::kFloat : parameter.tensor.scalar_type();
    collected.tensors.push_back(
        describe(parameter.name, parameter.tensor, dtype, TensorKind::parameter));
    for (const auto& [name, state_dtype] : kinds[i]) {
      collected.tensors.push_back(describe(
          state_name(parameter.name, name), parameter.tensor, state_dtype, TensorKind::state));
    }
  }
}

void sort_for_writing(std::vector<Source>& sources) {
  std::stable_sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
    return written_before(a.piece, b.piece);
  });
}

} // namespace

Collected collect(const Contents& contents, const Together& ranks) {
  Collected collected;
  if (contents.engine) {
    collect_engine(contents, ranks, collected);
  }
  for (const LooseTensor& loose : contents.loose) {
    collected.tensors.push_back(
        describe(loose.name, loose.tensor, loose.tensor.scalar_type(), loose.kind));
    if (ranks.rank() == 0) {
      add(collected.parameters, loose.name, 0, loose.tensor.detach());
    }
  }
  sort_for_writing(collected.parameters);
  sort_for_writing(collected.state);
  return collected;
}

at::Tensor flat(const at::Tensor& values) {
  const at::Tensor local = values.cpu();
  if (local.is_non_overlapping_and_dense()) {
    return local.as_strided({local.numel()}, {1});
  }
  return local.contiguous().view({-1});
}

} // namespace zero::checkpoint
