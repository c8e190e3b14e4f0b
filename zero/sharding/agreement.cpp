#include <zero/sharding/agreement.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include <zero/comm/texts.h>

namespace zero::sharding {
namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream line;
  line << tensor.dtype() << " " << tensor.sizes() << " strides " << tensor.strides() << " on "
       << tensor.device().type() << (tensor.requires_grad() ? "" : ", frozen");
  return line.str();
}

std::string describe(const Options& options) {
  std::ostringstream line;
  line << "options: stage " << options.stage << ", bucket_bytes " << options.bucket_bytes
       << ", first_bucket_bytes " << options.first_bucket_bytes << ", average " << options.average
       << ", transport " << options.transport << ", on_nonfinite " << options.on_nonfinite
       << ", step_in_backward " << options.step_in_backward << ", sync_buffers "
       << options.sync_buffers << ", offload " << options.offload.value_or("none")
       << ", registered_buffers " << options.registered_buffers;
  if (options.stage == 3) {
    line << ", prefetch " << options.prefetch << ", reshard_after_forward "
         << options.reshard_after_forward << ", max_live_numel "
         << options.max_live_numel.value_or(-1);
  }
  return line.str();
}

std::vector<std::string> lines_of(
    const std::vector<NamedParameter>& parameters,
    const std::vector<std::pair<std::string, at::Tensor>>& buffers,
    const Options& options) {
  std::vector<std::string> lines{describe(options)};
  for (const NamedParameter& parameter : parameters) {
    lines.push_back(
        "parameter '" + parameter.name + "' (" + describe(parameter.tensor) + ", group " +
        std::to_string(parameter.group) + ", unit " + std::to_string(parameter.unit) + ")");
  }
  for (const auto& [name, tensor] : buffers) {
    lines.push_back("buffer '" + name + "' (" + describe(tensor) + ")");
  }
  return lines;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line;
    text += '\n';
  }
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

} // namespace

void require_agreement(
    comm::Communicator& communicator,
    const std::vector<NamedParameter>& parameters,
    const std::vector<std::pair<std::string, at::Tensor>>& buffers,
    const Options& options) {
  const std::string text = join(lines_of(parameters, buffers, options));
  const uint64_t own = comm::fingerprint(text);
  const comm::Tag tag{"the comparison of models at construction", 0, 0, false};
  const at::Tensor own_bytes = comm::bytes_of({reinterpret_cast<const char*>(&own), sizeof(own)});
  bool equal = true;
  for (const at::Tensor& other : communicator.exchange(own_bytes, tag)) {
    equal = equal && std::memcmp(other.const_data_ptr(), &own, sizeof(own)) == 0;
  }
  if (equal) {
    return;
  }
  const auto texts = communicator.exchange(comm::bytes_of(text), tag);
  const std::vector<std::string> first = split(comm::text_of(texts.front()));
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const std::vector<std::string> other = split(comm::text_of(texts[rank]));
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string missing = "nothing (the list ends)";
      const std::string& ours = i < first.size() ? first[i] : missing;
      const std::string& theirs = i < other.size() ? other[i] : missing;
      TORCH_CHECK_VALUE(
          ours == theirs,
          "[zero.sharding] ranks were given different models: in position ",
          i,
          ", rank 0 has ",
          ours,
          ", rank ",
          rank,
          " has ",
          theirs,
          " (seen on rank ",
          communicator.rank(),
          " of ",
          communicator.size(),
          "); build the same model with the same options, registered in the same order, on every "
          "rank");
    }
  }
}

} // namespace zero::sharding
