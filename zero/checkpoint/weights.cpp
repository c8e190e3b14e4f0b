#include <zero/checkpoint/weights.h>

#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <zero/checkpoint/checksum.h>
#include <zero/checkpoint/permute.h>
#include <zero/checkpoint/safetensors.h>
#include <zero/checkpoint/save.h>
#include <zero/checkpoint/together.h>

namespace zero::checkpoint {
namespace {

// By the first name of what a model has: the name in the source.
using Aliases = std::map<std::string, std::string>;

// Takes other names of tied tensors out of `found`; the first one stands there then.
Aliases resolve_tied(Shapes& found, const Contents& contents) {
  Aliases aliases;
  for (const auto& [name, first] : contents.tied) {
    if (const auto other = found.find(name); other != found.end()) {
      if (found.emplace(first, other->second).second) {
        aliases[first] = name;
      }
      found.erase(name);
    }
  }
  return aliases;
}

std::string fingerprint(const Shapes& shapes) {
  std::string text;
  for (const auto& [name, shape] : shapes) {
    text += c10::str(name, " ", c10::IntArrayRef(shape), "\n");
  }
  return checksum_text(checksum(text.data(), static_cast<int64_t>(text.size())));
}

Shapes open_together(const WeightSource& source, const Together& ranks) {
  Shapes found;
  const std::vector<std::string> opened = ranks.run([&] {
    found = source.open();
    return fingerprint(found);
  });
  ranks.run([&] {
    TORCH_CHECK_VALUE(
        opened[ranks.rank()] == opened[0],
        "[zero.checkpoint] expected the same tensors in '",
        source.where,
        "' on all ranks, got others on rank ",
        ranks.rank(),
        " than on rank 0; ranks need a file system that they share");
    return std::string();
  });
  return found;
}

// The elements in the memory order of `like`.
at::Tensor flattened(const at::Tensor& whole, const at::Tensor& like) {
  std::vector<int64_t> order;
  if (like.is_non_overlapping_and_dense()) {
    order = memory_order(like.sizes().vec(), like.strides().vec());
  }
  const at::Tensor turned = order.empty() ? whole : whole.permute(order);
  return turned.contiguous().view({-1});
}

class Filler {
 public:
  Filler(const WeightSource& source, const Shapes& found, const Aliases& aliases)
      : source_(source), found_(found), aliases_(aliases) {}

  void fill(const NamedParameter& parameter, const StoredPart& part) {
    if (name_ != parameter.name) { // parts of one come one after the other
      name_ = parameter.name;
      flat_ = at::Tensor();
      if (found_.contains(name_)) {
        flat_ = flattened(read(name_), parameter.tensor);
      }
    }
    if (flat_.defined()) {
      at::Tensor(part.values).copy_(flat_.narrow(0, part.begin, part.values.numel()));
    }
  }
  void fill(const LooseTensor& loose) {
    if (found_.contains(loose.name)) {
      loose.tensor.detach().copy_(read(loose.name)); // counts as a change
    }
  }

 private:
  at::Tensor read(const std::string& name) {
    const auto alias = aliases_.find(name);
    const std::string& key = alias == aliases_.end() ? name : alias->second;
    at::Tensor whole = source_.read(key);
    TORCH_CHECK_VALUE(
        whole.sizes() == c10::IntArrayRef(found_.at(name)),
        "[zero.checkpoint] '",
        source_.where,
        "' was changed while it was being read: '",
        key,
        "' had another shape");
    return whole;
  }

  const WeightSource& source_;
  const Shapes& found_;
  const Aliases& aliases_;
  std::string name_;
  at::Tensor flat_;
};

} // namespace

WeightSource safetensors_source(const std::string& file) {
  auto reader = std::make_shared<std::unique_ptr<SafetensorsReader>>();
  const auto open = [file, reader] {
    *reader = std::make_unique<SafetensorsReader>(file);
    Shapes shapes;
    for (const StoredTensor& tensor : (*reader)->tensors()) {
      shapes[tensor.name] = tensor.shape;
    }
    return shapes;
  };
  const auto read = [reader](const std::string& name) {
    const StoredTensor& tensor = (*reader)->at(name);
    const at::Tensor whole = at::empty(tensor.shape, tensor.dtype);
    (*reader)->read(name, 0, tensor.numel, whole.mutable_data_ptr());
    return whole;
  };
  return {file, open, read};
}

LoadResult load_weights(const WeightSource& source, const Contents& contents, bool strict) {
  const at::NoGradGuard no_grad;
  Engine* engine = contents.engine.get();
  settle_background_save(engine);
  const Together ranks(engine, "loading '" + source.where + "'");
  Shapes found = open_together(source, ranks);
  const Aliases aliases = resolve_tied(found, contents);
  LoadResult result;
  ranks.run([&] {
    result = match(shapes_of(contents), found, source.where, strict);
    return std::string();
  });
  fill_together(engine, ranks, [&](const std::vector<StoredPart>& parts) {
    Filler filler(source, found, aliases);
    for (const StoredPart& part : parts) {
      filler.fill(engine->parameter(part.index), part);
    }
    for (const LooseTensor& loose : contents.loose) {
      filler.fill(loose);
    }
  });
  return result;
}

} // namespace zero::checkpoint
