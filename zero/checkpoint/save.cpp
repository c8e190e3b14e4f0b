#include <zero/checkpoint/save.h>

#include <memory>
#include <utility>

#include <torch/version.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <zero/checkpoint/prepared_save.h>

namespace zero::checkpoint {
namespace {

// All of it, not yet flushed.
std::unique_ptr<PartWriter>
write(const SaveDirectory& directory, const PartTarget& target, std::vector<Source>& sources) {
  std::vector<OwnPiece> pieces;
  pieces.reserve(sources.size());
  for (const Source& source : sources) {
    pieces.push_back(source.piece);
  }
  auto writer = std::make_unique<PartWriter>(directory, target, pieces);
  for (Source& source : sources) {
    const at::Tensor values = flat(std::exchange(source.values, {}));
    writer->write(values.const_data_ptr(), static_cast<int64_t>(values.nbytes()));
  }
  return writer;
}

} // namespace

PreparedSave::PreparedSave(std::string path, const Contents& contents, SaveOptions options)
    : path_(std::move(path)),
      options_(std::move(options)),
      tied_(contents.tied),
      stage_(contents.engine ? contents.engine->options().stage : 0) {
  const at::NoGradGuard no_grad;
  const Together ranks(contents.engine.get(), "saving '" + path_ + "'");
  generation_ = ranks.run_first([] { return new_generation(); });
  collected_ = collect(contents, ranks);
  ranks.run_first([&] { // one makes it, the others find it
    directory_ = std::make_unique<SaveDirectory>(path_, generation_);
    return std::string();
  });
}

void PreparedSave::copy() {
  const at::NoGradGuard no_grad;
  for (auto* sources : {&collected_.parameters, &collected_.state}) {
    for (Source& source : *sources) {
      const at::Tensor values = flat(source.values);
      const bool own = !values.is_alias_of(source.values); // came from another device
      source.values = own ? values : at::empty_like(values).copy_(values);
    }
  }
}

Manifest PreparedSave::manifest(const std::vector<std::string>& written) {
  Manifest manifest;
  manifest.library = "zero " ZERO_VERSION;
  manifest.torch = TORCH_VERSION;
  manifest.world_size = static_cast<int64_t>(written.size());
  manifest.stage = stage_;
  manifest.generation = generation_;
  manifest.tensors = std::move(collected_.tensors);
  manifest.tied = tied_;
  manifest.optimizer = options_.optimizer;
  manifest.scalars = options_.scalars;
  manifest.extra = options_.extra;
  for (const std::string& of_rank : written) {
    add_files(manifest, written_files_from_json(of_rank));
  }
  return manifest;
}

void PreparedSave::finish(const Together& ranks) {
  const at::NoGradGuard no_grad;
  const int64_t rank = ranks.rank();
  const std::vector<std::string> written = ranks.run([&] {
    if (!directory_) {
      directory_ = std::make_unique<SaveDirectory>(path_, generation_);
    }
    // The disk works on the parameters while the state is written.
    const auto parameters = write(
        *directory_, {FileKind::parameters, rank, options_.part_bytes}, collected_.parameters);
    const auto optimizer =
        write(*directory_, {FileKind::optimizer, rank, options_.part_bytes}, collected_.state);
    std::vector<WrittenFile> files = parameters->finish();
    const std::vector<WrittenFile> state = optimizer->finish();
    files.insert(files.end(), state.begin(), state.end());
    return to_json(files);
  });
  if (rank != 0) {
    directory_->release();
  }
  ranks.run_first([&] {
    directory_->commit(to_json(manifest(written)));
    if (options_.keep_last > 0) {
      rotate(path_, options_.keep_last);
    }
    return std::string();
  });
}

void save(const std::string& path, const Contents& contents, const SaveOptions& options) {
  settle_background_save(contents.engine.get());
  PreparedSave prepared(path, contents, options);
  prepared.finish(Together(contents.engine.get(), "saving '" + path + "'"));
}

} // namespace zero::checkpoint
