// zero::consolidate and zero::load_weights: whole tensors out of a checkpoint, and in.

#include "checkpoint_files.h"
#include "engine_cases.h"

#include <cstdio>
#include <cstring>

using namespace zero::test;
namespace fs = std::filesystem;

namespace {

// A parameter that lies transposed in memory, a tied one, buffers, several dtypes.
struct Odd : torch::nn::Module {
  Odd() {
    turned = register_parameter("turned", torch::arange(12.0F).view({3, 4}).t());
    half = register_parameter("half", torch::tensor({1.5F, -2.0F}, torch::kBFloat16));
    empty = register_parameter("empty", torch::zeros({0, 3}));
    register_parameter("again", turned);
    count = register_buffer("count", torch::tensor({7}, torch::kLong));
    mean = register_buffer("mean", torch::tensor({0.25, 0.1}, torch::kDouble));
  }
  at::Tensor turned, half, empty, count, mean;
};

// A tensor of a safetensors file, read with nothing of this library.
struct Found {
  std::string dtype;
  std::string shape;
  std::string bytes;
};

Found find(const std::string& file, const std::string& name) {
  const std::string text = read_file(file);
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) {
    length = length << 8U | static_cast<unsigned char>(text[i]);
  }
  const std::string header = text.substr(8, length);
  const size_t at = header.find("\"" + name + "\":{");
  INFO(file << " has no " << name << ": " << header);
  REQUIRE(at != std::string::npos);
  char dtype[16];
  char shape[64] = "";
  long long begin = 0;
  long long end = 0;
  const char* fields = header.c_str() + at + name.size() + 4;
  if (std::sscanf(
          fields,
          "\"dtype\":\"%15[^\"]\",\"shape\":[%63[^]]],\"data_offsets\":[%lld,%lld]",
          dtype,
          shape,
          &begin,
          &end) != 4) {
    REQUIRE(
        std::sscanf(
            fields,
            "\"dtype\":\"%15[^\"]\",\"shape\":[],\"data_offsets\":[%lld,%lld]",
            dtype,
            &begin,
            &end) == 3);
  }
  return {dtype, shape, text.substr(8 + length + begin, end - begin)};
}

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor row_major = tensor.detach().contiguous();
  return {static_cast<const char*>(row_major.const_data_ptr()), row_major.nbytes()};
}

std::vector<std::string> names_of(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

} // namespace

TEST_CASE("whole tensors in row-major order, under all of their names") {
  const TemporaryDirectory folder;
  Odd model;
  zero::save(folder / "saved", model);
  const std::string file = folder / "model.safetensors";
  REQUIRE(zero::consolidate(folder / "saved", file) == std::vector<std::string>{file});
  const at::Tensor want = torch::arange(12.0F).view({3, 4}).t();
  for (const char* name : {"turned", "again"}) {
    const Found found = find(file, name);
    REQUIRE((found.dtype == "F32" && found.shape == "4,3" && found.bytes == bytes_of(want)));
  }
  REQUIRE(find(file, "half").bytes == bytes_of(torch::tensor({1.5F, -2.0F}, torch::kBFloat16)));
  REQUIRE(find(file, "empty").shape == "0,3");
  REQUIRE(find(file, "count").dtype == "I64");
  REQUIRE(find(file, "mean").dtype == "F64");
  REQUIRE(read_file(file).find(R"("__metadata__":{"format":"pt"})") != std::string::npos);

  zero::consolidate(folder / "saved", file, {.dtype = at::kBFloat16, .tied = false});
  REQUIRE(find(file, "turned").bytes == bytes_of(want.to(at::kBFloat16)));
  REQUIRE(find(file, "mean").bytes == bytes_of(torch::tensor({0.25, 0.1}).to(at::kBFloat16)));
  REQUIRE(find(file, "count").bytes == bytes_of(torch::tensor({7}, torch::kLong)));
  REQUIRE(read_file(file).find(R"("again":"turned")") != std::string::npos);
  REQUIRE(read_file(file).find(R"("again":{)") == std::string::npos);
  zero::consolidate(folder / "saved", file, {.dtype = at::kFloat});
  REQUIRE(find(file, "half").bytes == bytes_of(torch::tensor({1.5F, -2.0F})));
}

TEST_CASE("from ranks and stages, and back into others") {
  const TemporaryDirectory folder;
  const std::string file = folder / "model.safetensors";
  for (int64_t stage = 0; stage <= 3; ++stage) {
    zero::Options options;
    options.stage = stage;
    options.min_unit_numel = 0;
    options.timeout = 20.0;
    std::map<std::string, std::string> want;
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{.lr = 0.01}, group);
      loss_of(*model, tokens_of(0, rank)).backward();
      optimizer.step();
      zero::save(folder / "saved", *model, &optimizer);
      for (const auto& item : model->named_parameters()) {
        const std::string bytes = bytes_of(zero::full_param(optimizer, item.value()));
        if (rank == 0) {
          want[item.key()] = bytes;
        }
      }
    });
    zero::consolidate(folder / "saved", file);
    for (const auto& [name, bytes] : want) {
      REQUIRE(find(file, name).bytes == bytes);
    }
    options.stage = 3 - stage;
    run_ranks(3, [&](int64_t, const auto& group) {
      const auto model = make_gpt(/*seed=*/5);
      zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{}, group);
      zero::load_weights(file, *model, &optimizer);
      for (const auto& item : model->named_parameters()) {
        require(
            bytes_of(zero::full_param(optimizer, item.value())) == want[item.key()],
            "the file's " + item.key());
      }
    });
  }
}

TEST_CASE("several files with an index replace each other") {
  const TemporaryDirectory folder;
  Odd model;
  zero::save(folder / "saved", model);
  const std::string file = folder / "model.safetensors";
  write_file(folder / "model-00001-of-x.safetensors", "not ours");
  for (int round = 0; round < 2; ++round) {
    zero::consolidate(folder / "saved", file);
    REQUIRE(
        names_of(folder.path()) ==
        std::vector<std::string>{"model-00001-of-x.safetensors", "model.safetensors", "saved"});
    const auto paths = zero::consolidate(folder / "saved", file, {.max_file_bytes = 60});
    REQUIRE(paths.size() == 4); // 16 + 8, 48 + 0 and 48 + 4 bytes
    REQUIRE(paths.back() == file + ".index.json");
    const auto names = names_of(folder.path());
    REQUIRE(names.size() == 6);
    REQUIRE(!has(names, "model.safetensors"));
    const std::string index = read_file(paths.back());
    REQUIRE(index.find(R"("total_size": 124)") != std::string::npos);
    for (const char* name : {"turned", "half", "empty", "again", "count", "mean"}) {
      const size_t at = index.find(std::string("\"").append(name).append("\": \"model-0000"));
      REQUIRE(at != std::string::npos);
      const std::string part = index.substr(at + std::strlen(name) + 5, 32);
      find(folder / part, name);
    }
    const auto again = zero::consolidate(folder / "saved", file, {.max_file_bytes = 50});
    REQUIRE(again.size() == 5);
    REQUIRE(names_of(folder.path()).size() == 2 + again.size());
  }
}

TEST_CASE("what is damaged is not exported, and what was there stays") {
  const TemporaryDirectory folder;
  Odd model;
  zero::save(folder / "saved", model);
  const std::string file = folder / "model.safetensors";
  write_file(file, "old");
  const auto refuse = [&](const std::string& part, const std::string& to) {
    require_error(part, [&] { zero::consolidate(folder / "saved", to); });
  };
  refuse("end in .safetensors", folder / "model.bin");
  refuse("outside of the checkpoint", folder / "saved/model.safetensors");
  fs::create_directories(folder / "saved/deep");
  refuse("outside of the checkpoint", folder / "saved/deep/model.safetensors");
  refuse("there is no directory", folder / "nowhere/model.safetensors");
  fs::create_directory(folder / "folder.safetensors");
  refuse("got a directory", folder / "folder.safetensors");
  require_error("there is no directory", [&] { zero::consolidate(folder / "no", file); });
  require_error(
      "max_file_bytes", [&] { zero::consolidate(folder / "saved", file, {.max_file_bytes = -1}); });
  require_error(
      "floating", [&] { zero::consolidate(folder / "saved", file, {.dtype = at::kInt}); });

  std::string data;
  for (const std::string& name : names_of(folder / "saved")) {
    if (name.starts_with("parameters-")) {
      data = folder / ("saved/" + name);
    }
  }
  fs::create_symlink(data, folder / "link.safetensors");
  refuse("outside of the checkpoint", folder / "link.safetensors");
  const std::string whole = read_file(data);
  for (const size_t back : {1, 20, 60}) { // in a tensor of each kind
    std::string bytes = whole;
    bytes[bytes.size() - back] ^= 1;
    write_file(data, bytes);
    require_error(data, [&] { zero::consolidate(folder / "saved", file, {.max_file_bytes = 1}); });
    REQUIRE(read_file(file) == "old");
    REQUIRE(names_of(folder.path()).size() == 4);
  }
  write_file(data, whole.substr(0, whole.size() - 1));
  refuse("was cut off", file);
  fs::remove(data);
  require_error<c10::Error>(data, [&] { zero::consolidate(folder / "saved", file); });
  REQUIRE(read_file(file) == "old");
}

TEST_CASE("weights that do not fit change nothing") {
  const TemporaryDirectory folder;
  Odd model;
  zero::save(folder / "saved", model);
  const std::string file = folder / "model.safetensors";
  zero::consolidate(folder / "saved", file);
  Odd same;
  {
    const torch::NoGradGuard no_grad;
    same.turned.zero_();
    same.mean.zero_();
  }
  zero::load_weights(file, same);
  REQUIRE(torch::equal(same.turned, model.turned));
  REQUIRE(torch::equal(same.mean, model.mean));

  torch::nn::Module other;
  const at::Tensor turned = other.register_parameter("turned", torch::zeros({3, 4}));
  const at::Tensor mean = other.register_buffer("mean", torch::zeros(2, torch::kDouble));
  other.register_buffer("more", torch::zeros(1));
  const std::string text = error_of([&] { zero::load_weights(file, other); });
  for (const char* part :
       {"missing: 'more'", "'half'", "'turned' [4, 3] instead of [3, 4]", "model.safetensors"}) {
    INFO(text);
    REQUIRE(text.find(part) != std::string::npos);
  }
  REQUIRE(mean.sum().item<double>() == 0.0);
  torch::nn::Module part;
  const at::Tensor wanted = part.register_buffer("mean", torch::zeros(2));
  part.register_buffer("more", torch::zeros(1));
  zero::load_weights(file, part, nullptr, {.strict = false});
  REQUIRE(torch::equal(wanted, torch::tensor({0.25F, 0.1F})));
  write_file(file, "none");
  require_error("model.safetensors", [&] { zero::load_weights(file, part); });
  zero::consolidate(folder / "saved", file);
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const auto net = make_gpt();
    zero::Options options;
    options.timeout = 20.0;
    zero::ZeroOptimizer optimizer(*net, options, zero::AdamW{}, group);
    const std::string path = rank == 0 ? folder / "absent" : file;
    require(
        contains(
            zero::test::error_of([&] { zero::load_weights(path, *net, &optimizer); }), "absent"),
        "an error on all ranks");
  });
}
