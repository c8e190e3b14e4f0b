// zero::consolidate: a checkpoint's pieces put together in files of whole tensors.

#include <zero/checkpoint/checkpoint.h>

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <zero/checkpoint/data_files.h>
#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/dtypes.h>
#include <zero/checkpoint/export_files.h>
#include <zero/checkpoint/permute.h>
#include <zero/checkpoint/safetensors.h>

namespace zero {
namespace {

using namespace checkpoint;

constexpr int64_t kBlockBytes = int64_t{8} << 20;

// A tensor of the export, and where it comes from.
struct Output {
  TensorEntry entry;
  const ManifestTensor* source = nullptr;
  int64_t bytes() const {
    return source->numel() * static_cast<int64_t>(c10::elementSize(entry.dtype));
  }
};

void check(const ConsolidateSettings& settings) {
  if (settings.dtype) {
    TORCH_CHECK_VALUE(
        c10::isFloatingType(*settings.dtype),
        "[zero.checkpoint] expected dtype to be a floating one, got ",
        *settings.dtype);
    dtype_name(*settings.dtype, "dtype"); // throws where there is none
  }
  TORCH_CHECK_VALUE(
      settings.max_file_bytes >= 0,
      "[zero.checkpoint] expected max_file_bytes to be at least 1, or 0 for one file, got ",
      settings.max_file_bytes);
}

// In the order in which they are written.
std::vector<Output>
outputs_of(const Manifest& manifest, const ConsolidateSettings& settings, Metadata& metadata) {
  std::vector<Output> outputs;
  std::map<std::string, size_t> places;
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (tensor.kind != TensorKind::state) {
      const bool convert = settings.dtype && c10::isFloatingType(tensor.dtype);
      places[tensor.name] = outputs.size();
      outputs.push_back(
          {{tensor.name, convert ? *settings.dtype : tensor.dtype, tensor.shape}, &tensor});
    }
  }
  for (const auto& [name, same_as] : manifest.tied) {
    if (!settings.tied) {
      metadata[name] = same_as;
    } else if (const auto found = places.find(same_as); found != places.end()) {
      Output output = outputs[found->second];
      output.entry.name = name;
      outputs.push_back(std::move(output));
    }
  }
  std::stable_sort(outputs.begin(), outputs.end(), [](const Output& a, const Output& b) {
    return c10::elementSize(a.entry.dtype) > c10::elementSize(b.entry.dtype);
  });
  return outputs;
}

// As they go into files; at least one file.
std::vector<std::vector<Output>> divide(std::vector<Output> outputs, int64_t max_file_bytes) {
  std::vector<std::vector<Output>> files(1);
  int64_t bytes = 0;
  for (Output& output : outputs) {
    if (max_file_bytes > 0 && !files.back().empty() && output.bytes() > max_file_bytes - bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += output.bytes();
    files.back().push_back(std::move(output));
  }
  return files;
}

// Writes elements that have the source's dtype.
void write_elements(
    const Output& output,
    const void* data,
    int64_t count,
    SafetensorsWriter& writer) {
  if (output.entry.dtype == output.source->dtype) {
    writer.write(data, count * static_cast<int64_t>(c10::elementSize(output.entry.dtype)));
    return;
  }
  // from_blob takes no const data, and copy_ reads it only.
  const at::Tensor source =
      at::from_blob(const_cast<void*>(data), {count}, at::TensorOptions(output.source->dtype));
  const at::Tensor converted = at::empty({count}, output.entry.dtype);
  converted.copy_(source);
  writer.write(converted.const_data_ptr(), static_cast<int64_t>(converted.nbytes()));
}

void write_tensor(DataFiles& files, const Output& output, SafetensorsWriter& writer) {
  const ManifestTensor& tensor = *output.source;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t block = kBlockBytes / itemsize;
  if (same_order(tensor.shape, tensor.order, {})) {
    files.stream(tensor, block, [&](const void* data, int64_t count) {
      write_elements(output, data, count, writer);
    });
    return;
  }
  const int64_t numel = tensor.numel();
  std::vector<char> whole(numel * itemsize);
  std::vector<char> part(std::min(block, numel) * itemsize);
  files.read(tensor, {0, numel}, tensor.order, whole.data());
  const Reordering row_major{.shape = tensor.shape, .from = tensor.order, .itemsize = itemsize};
  for (int64_t begin = 0; begin < numel; begin += block) {
    const layout::Range wanted{begin, std::min(begin + block, numel)};
    permute_elements(row_major, whole.data(), wanted, part.data());
    write_elements(output, part.data(), wanted.size(), writer);
  }
}

} // namespace

std::vector<std::string> consolidate(
    const std::string& directory,
    const std::string& file,
    const ConsolidateSettings& settings) {
  const at::NoGradGuard no_grad;
  check(settings);
  const Manifest manifest = read_manifest(directory);
  ExportFiles exported(file, directory);
  DataFiles data(directory, manifest, settings.verify ? Check::pieces : Check::none);
  Metadata metadata = {{"format", "pt"}};
  const auto files = divide(outputs_of(manifest, settings, metadata), settings.max_file_bytes);
  std::vector<std::pair<std::string, std::string>> places;
  int64_t bytes = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        exported.name(static_cast<int64_t>(i), static_cast<int64_t>(files.size()));
    std::vector<TensorEntry> entries;
    for (const Output& output : files[i]) {
      entries.push_back(output.entry);
      places.emplace_back(output.entry.name, name);
      bytes += output.bytes();
    }
    SafetensorsWriter writer(exported.add(name), std::move(entries), metadata);
    for (const Output& output : files[i]) {
      write_tensor(data, output, writer);
    }
    writer.finish();
  }
  if (files.size() > 1) {
    exported.add_index(places, bytes);
  }
  return exported.commit();
}

} // namespace zero
