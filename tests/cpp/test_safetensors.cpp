// XXH64, and the safetensors format byte for byte.

#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <sys/resource.h>

#include "checkpoint_files.h"

#include <zero/checkpoint/checksum.h>
#include <zero/checkpoint/dtypes.h>
#include <zero/checkpoint/safetensors.h>

using namespace zero::checkpoint;
using namespace zero::test;

namespace {

// XXH64 as its specification says it, byte by byte.
uint64_t slow_checksum(const std::string& text) {
  const uint64_t p1 = 11400714785074694791U, p2 = 14029467366897019727U;
  const uint64_t p3 = 1609587929392839161U, p4 = 9650029242287828579U;
  const uint64_t p5 = 2870177450012600261U;
  const auto turn = [](uint64_t x, int by) {
    for (; by > 0; --by) {
      x = x * 2 + (x >= (uint64_t{1} << 63) ? 1 : 0);
    }
    return x;
  };
  const auto word = [&](size_t at, int bytes) {
    uint64_t x = 0;
    for (int i = bytes - 1; i >= 0; --i) {
      x = x * 256 + static_cast<unsigned char>(text[at + i]);
    }
    return x;
  };
  const auto mix = [&](uint64_t lane, uint64_t x) { return turn(lane + x * p2, 31) * p1; };
  uint64_t lanes[4] = {p1 + p2, p2, 0, 0 - p1};
  size_t at = 0;
  for (; text.size() - at >= 32; at += 32) {
    for (int i = 0; i < 4; ++i) {
      lanes[i] = mix(lanes[i], word(at + 8 * i, 8));
    }
  }
  uint64_t sum = p5;
  if (text.size() >= 32) {
    sum = turn(lanes[0], 1) + turn(lanes[1], 7) + turn(lanes[2], 12) + turn(lanes[3], 18);
    for (const uint64_t lane : lanes) {
      sum = (sum ^ mix(0, lane)) * p1 + p4;
    }
  }
  sum += text.size();
  for (; text.size() - at >= 8; at += 8) {
    sum = turn(sum ^ mix(0, word(at, 8)), 27) * p1 + p4;
  }
  for (; text.size() - at >= 4; at += 4) {
    sum = turn(sum ^ word(at, 4) * p1, 23) * p2 + p3;
  }
  for (; at < text.size(); ++at) {
    sum = turn(sum ^ word(at, 1) * p5, 11) * p1;
  }
  sum = (sum ^ sum / (uint64_t{1} << 33)) * p2;
  sum = (sum ^ sum / (uint64_t{1} << 29)) * p3;
  return sum ^ sum / (uint64_t{1} << 32);
}

uint64_t checksum_of(const std::string& text) {
  return checksum(text.data(), static_cast<int64_t>(text.size()));
}

} // namespace

TEST_CASE("checksums are those of XXH64") {
  REQUIRE(checksum_of("") == 0xEF46DB3751D8E999);
  REQUIRE(checksum_of("a") == 0xD24EC4F1A98C6E5B);
  REQUIRE(checksum_of("abc") == 0x44BC2CF5AD770999);
  REQUIRE(checksum_of("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1);
  std::mt19937 random(1);
  for (size_t size = 0; size < 300; ++size) {
    const std::string text = random_bytes(random, size);
    REQUIRE(checksum_of(text) == slow_checksum(text));
  }
}

TEST_CASE("a checksum does not depend on the parts") {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const std::string text = random_bytes(random, below(random, 500));
    Checksum sum;
    for (size_t at = 0; at < text.size();) {
      const size_t part = std::min(text.size() - at, below(random, 70));
      sum.update(text.data() + at, static_cast<int64_t>(part));
      REQUIRE(sum.value() == slow_checksum(text.substr(0, at + part)));
      at += part;
    }
    REQUIRE(sum.value() == slow_checksum(text));
  }
}

TEST_CASE("checksums as text") {
  uint64_t value = 1;
  REQUIRE(checksum_text(0x0123456789ABCDEF) == "0123456789abcdef");
  REQUIRE(parse_checksum("0123456789abcdef", &value));
  REQUIRE(value == 0x0123456789ABCDEF);
  for (const auto* wrong :
       {"", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF", "0123456789abcdeg"}) {
    REQUIRE_FALSE(parse_checksum(wrong, &value));
  }
}

TEST_CASE("a file is what the format says, byte for byte") {
  const TemporaryDirectory folder;
  const float b[2] = {1.0F, -2.0F};
  const uint16_t a[3] = {0x3F80, 0x4000, 0xC000};
  SafetensorsWriter writer(
      folder / "x.safetensors",
      {{"b", c10::ScalarType::Float, {2}}, {"a", c10::ScalarType::BFloat16, {3}}},
      {{"k", "v"}});
  writer.write(b, 4);
  writer.write(b + 1, 4);
  writer.write(a, 6);
  writer.finish();
  const std::string expected = std::string("\x88\0\0\0\0\0\0\0", 8) +
      "{\"__metadata__\":{\"k\":\"v\"},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,"
      "8]},"
      "\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[8,14]}}  " +
      std::string("\x00\x00\x80\x3F\x00\x00\x00\xC0\x80\x3F\x00\x40\x00\xC0", 14);
  REQUIRE(read_file(folder / "x.safetensors") == expected);
  REQUIRE(writer.bytes() == static_cast<int64_t>(expected.size()));
  REQUIRE(
      writer.checksums() ==
      std::vector<uint64_t>{
          slow_checksum(expected.substr(144, 8)), slow_checksum(expected.substr(152))});
}

TEST_CASE("every dtype, any shape and any range comes back") {
  const TemporaryDirectory folder;
  std::mt19937 random(3);
  std::vector<TensorEntry> entries;
  std::vector<std::string> data;
  auto dtypes = stored_dtypes();
  REQUIRE(dtypes.size() == 17);
  std::stable_sort(dtypes.begin(), dtypes.end(), [](auto a, auto b) {
    return c10::elementSize(a) > c10::elementSize(b);
  });
  for (const auto dtype : dtypes) {
    for (const auto& [shape, numel] : std::vector<std::pair<std::vector<int64_t>, size_t>>{
             {{}, 1}, {{0}, 0}, {{3, 0, 2}, 0}, {{5, 7}, 35}, {{1001}, 1001}}) {
      entries.push_back({"w\"\\\n\xC3\xA4 " + std::to_string(entries.size()), dtype, shape});
      data.push_back(random_bytes(random, numel * c10::elementSize(dtype)));
    }
  }
  SafetensorsWriter writer(folder / "all", entries);
  for (const std::string& bytes : data) {
    writer.write(bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  writer.finish();

  const SafetensorsReader reader(folder / "all");
  REQUIRE(reader.bytes() == static_cast<int64_t>(read_file(folder / "all").size()));
  REQUIRE(reader.tensors().size() == entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const StoredTensor& tensor = reader.at(entries[i].name);
    REQUIRE(tensor.dtype == entries[i].dtype);
    REQUIRE(tensor.shape == entries[i].shape);
    REQUIRE(tensor.begin % static_cast<int64_t>(c10::elementSize(tensor.dtype)) == 0);
    REQUIRE(writer.checksums()[i] == slow_checksum(data[i]));
    REQUIRE(reader.checksum(tensor.name) == slow_checksum(data[i]));
    const size_t itemsize = c10::elementSize(tensor.dtype);
    for (int round = 0; round < 10; ++round) {
      const size_t first = below(random, tensor.numel + 1);
      const size_t count = below(random, tensor.numel - first + 1);
      std::string part(count * itemsize, '\0');
      reader.read(tensor.name, first, count, part.data());
      REQUIRE(part == data[i].substr(first * itemsize, count * itemsize));
    }
    require_error("range", [&] { reader.read(tensor.name, 1, tensor.numel, nullptr); });
    require_error("range", [&] { reader.read(tensor.name, -1, 1, nullptr); });
    require_error("range", [&] { reader.read(tensor.name, 1, INT64_MAX, nullptr); });
  }
  require_error("has no tensor 'v'", [&] { reader.read("v", 0, 0, nullptr); });
  REQUIRE(reader.find("v") == nullptr);
}

TEST_CASE("metadata and an empty file come back") {
  const TemporaryDirectory folder;
  const Metadata metadata = {{"format", "pt"}, {"quote\"", "\xE2\x82\xAC"}};
  SafetensorsWriter(folder / "empty", {}, metadata).finish();
  const SafetensorsReader reader(folder / "empty");
  REQUIRE(reader.tensors().empty());
  REQUIRE(reader.metadata() == metadata);
  SafetensorsWriter(folder / "nothing", {}).finish();
  REQUIRE(read_file(folder / "nothing") == safetensors_bytes("{}      ", ""));
}

TEST_CASE("a writer refuses what it can't write, and leaves no file") {
  const TemporaryDirectory folder;
  const std::string path = folder / "x";
  const auto f32 = c10::ScalarType::Float;
  const auto write = [&](std::vector<TensorEntry> entries) {
    return [&path, entries] { SafetensorsWriter(path, entries).finish(); };
  };
  require_error("is taken", write({{"a", f32, {0}}, {"a", f32, {0}}}));
  require_error("is taken", write({{"__metadata__", f32, {0}}}));
  require_error("falling itemsize", write({{"a", c10::ScalarType::Half, {0}}, {"b", f32, {0}}}));
  require_error("no possible size", write({{"a", f32, {-1}}}));
  require_error("no possible size", write({{"a", f32, {int64_t{1} << 40, int64_t{1} << 40}}}));
  require_error("UTF-8", write({{"\xFF", f32, {0}}}));
  require_error<c10::TypeError>(
      "'a' is of ComplexDouble", write({{"a", c10::ScalarType::ComplexDouble, {0}}}));
  require_error("4 bytes are missing for 'a'", write({{"a", f32, {1}}}));
  require_error("at most 4 bytes for 'a', got 5", [&] {
    SafetensorsWriter(path, {{"a", f32, {1}}}).write("12345", 5);
  });
  require_error("at most 0 bytes for 'the end', got 1", [&] {
    SafetensorsWriter(path, {{"a", f32, {0}}}).write("1", 1);
  });
  REQUIRE_FALSE(std::filesystem::exists(path));
  write_file(path, "mine");
  require_error<c10::Error>("File exists", write({}));
  REQUIRE(read_file(path) == "mine");
  require_error<c10::Error>("No such file", [&] { SafetensorsWriter(folder / "none/x", {}); });
}

TEST_CASE("a disk that is full is said to be") {
  const std::string text = write_error(ENOSPC, "writing", "/tmp/x", 12345);
  REQUIRE(text.find("writing '/tmp/x' failed") != std::string::npos);
  REQUIRE(text.find("the disk is full; the file needs 12345 bytes") != std::string::npos);
  REQUIRE(text.find("bytes are left on the disk") != std::string::npos);
  const File full(open("/dev/full", O_WRONLY | O_CLOEXEC), "/dev/full");
  require_error<c10::Error>("the disk is full", [&] { write_all(full, "x", 1, 1); });
}

TEST_CASE("a file whose writing failed is removed") {
  const TemporaryDirectory folder;
  struct rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::string data(100'000, 'x');
  std::string text;
  try {
    SafetensorsWriter writer(folder / "x", {{"a", c10::ScalarType::Byte, {100'000}}});
    writer.write(data.data(), 100'000);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, handler);
  REQUIRE(
      text.find("writing '" + folder.path() + "/x' failed: File too large") != std::string::npos);
  REQUIRE(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a header that does not fit its file is refused") {
  const TemporaryDirectory folder;
  const auto refuse = [&](const std::string& part, const std::string& bytes) {
    write_file(folder / "x", bytes);
    INFO(bytes);
    require_error(folder / "x", [&] { SafetensorsReader reader(folder / "x"); });
    require_error(part, [&] { SafetensorsReader reader(folder / "x"); });
  };
  const auto header = [&](const std::string& part, const std::string& json) {
    refuse(part, safetensors_bytes(json, "12345678"));
  };
  refuse("cut off", "");
  refuse("cut off", "1234567");
  refuse("does not fit", std::string(8, '\xFF') + "{}");
  refuse("does not fit", std::string("\3\0\0\0\0\0\0\0{}", 10));
  refuse("'{'", std::string(16, '\0'));
  header("'{'", " {}");
  header("well-formed", "{");
  header("well-formed", "{}x");
  header("well-formed", "{\"a\":1e999}");
  header("well-formed", "{\"\xFF\":{}}");
  header("its tensors take 0 bytes, it has 8", "{}");
  const std::string right = "\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]";
  header("field 'x' is not known", "{\"a\":{" + right + ",\"x\":1}}");
  header("'dtype' stands twice", "{\"a\":{" + right + ",\"dtype\":\"U8\"}}");
  header("the name stands twice", "{\"a\":{" + right + "},\"a\":{" + right + "}}");
  header("overlap", "{\"a\":{" + right + "},\"b\":{" + right + "}}");
  header("expected dtype, shape", "{\"a\":{\"dtype\":\"U8\",\"shape\":[8]}}");
  header("dtype 'u8' is not known", R"({"a":{"dtype":"u8","shape":[8],"data_offsets":[0,8]}})");
  header("negative", R"({"a":{"dtype":"U8","shape":[-8],"data_offsets":[0,8]}})");
  header("no integer", R"({"a":{"dtype":"U8","shape":[8.0],"data_offsets":[0,8]}})");
  header("a string", R"({"a":{"dtype":"U8","shape":["8"],"data_offsets":[0,8]}})");
  header("a list", R"({"a":{"dtype":"U8","shape":[[8]],"data_offsets":[0,8]}})");
  header("too large", R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,8]}})");
  header("two data_offsets", R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8,8]}})");
  header("are not what", R"({"a":{"dtype":"U8","shape":[7],"data_offsets":[0,8]}})");
  header("are not what", R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[8,0]}})");
  // 2^32 * 2^32 * 1 is 0 in 64 bits.
  header(
      "are not what",
      R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})");
  header("it has 8", R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})");
  header("it has 8", R"({"a":{"dtype":"U8","shape":[7],"data_offsets":[0,7]}})");
  header(
      "expected 0: tensors overlap, or there is a gap",
      R"({"a":{"dtype":"U8","shape":[7],"data_offsets":[1,8]}})");
  header("a number", R"({"__metadata__":{"a":1},"a":{)" + right + "}}");
  header("an object", R"({"__metadata__":{"a":{}},"a":{)" + right + "}}");
  header("a list", "{\"a\":" + std::string(100'000, '['));
  std::string many = "1";
  for (int i = 0; i < 64; ++i) {
    many += ",1";
  }
  header("more than 64", R"({"a":{"dtype":"U8","shape":[)" + many + "]}}");
}

TEST_CASE("a file of another writer is read") {
  const TemporaryDirectory folder;
  // Any order in the header, spaces, no alignment.
  write_file(
      folder / "x",
      safetensors_bytes(
          R"({ "b": {"data_offsets": [3, 7], "shape": [2, 1], "dtype": "I16"}, "a": {"dtype":)"
          R"("U8","shape":[3],"data_offsets":[0,3]},"c":{"dtype":"F64","shape":[0],"data_offsets":[7,7]}} )",
          std::string("abc\1\0\2\0", 7)));
  const SafetensorsReader reader(folder / "x");
  int16_t b[2] = {};
  reader.read("b", 0, 2, b);
  REQUIRE((b[0] == 1 && b[1] == 2));
  REQUIRE(reader.tensors()[0].name == "a");
  REQUIRE(reader.at("c").numel == 0);
  std::filesystem::resize_file(folder / "x", read_file(folder / "x").size() - 1);
  require_error("cut off while it was being read", [&] { reader.read("b", 1, 1, b); });
}
