// The manifest: what comes back, and what is refused.

#include "checkpoint_files.h"

#include <zero/checkpoint/manifest.h>

using namespace zero::checkpoint;
using namespace zero::test;

namespace {

Manifest sample() {
  Manifest manifest;
  manifest.library = "zero 0.1.0";
  manifest.torch = "2.13.0+cpu";
  manifest.world_size = 2;
  manifest.stage = 3;
  manifest.generation = "0a1b2c3d";
  manifest.files = {
      {"parameters-0a1b2c3d-0-0.safetensors", 1000},
      {"parameters-0a1b2c3d-1-0.safetensors", 2000},
      {"optimizer-0a1b2c3d-1-12.safetensors", 0}};
  manifest.tensors = {
      {.name = "blocks.0.w\"\\\n\xC3\xA4",
       .shape = {2, 3, 4},
       .order = {0, 2, 1},
       .pieces = {{0, 0, 10, 0xFFFFFFFFFFFFFFFF}, {1, 10, 14, 1}}},
      {.name = "scale", .dtype = c10::ScalarType::BFloat16, .pieces = {{1, 0, 1, 2}}},
      {.name = "none", .dtype = c10::ScalarType::Long, .shape = {0, 5}, .kind = TensorKind::buffer},
      {.name = "exp_avg/scale", .kind = TensorKind::state, .pieces = {{2, 0, 1, 3}}}};
  manifest.tied = {{"head", "scale"}};
  manifest.optimizer = R"({"groups": [{"lr": 0.1, "betas": [0.9, 0.999]}], "}": "{[\"\\"})";
  manifest.scalars = " [123456789012345678901234567890, 0.10000000000000000001, 1e-300, -0] ";
  manifest.extra = "{\"step\": 1000,\n \"nested\": {\"checksum\": \"0000\"}}";
  return manifest;
}

// The text of the sample with one part replaced, and the right checksum.
std::string edited(const std::string& part, const std::string& by) {
  const std::string original = to_json(sample());
  const size_t at = original.find(part);
  INFO(part);
  REQUIRE(at != std::string::npos);
  const std::string text = original.substr(0, at) + by + original.substr(at + part.size());
  const size_t end = text.rfind(",\n\"checksum\": \"");
  return seal(text.substr(0, end) + "}");
}

void refuse(const std::string& expected, const std::string& part, const std::string& by) {
  const std::string text = edited(part, by);
  INFO(part << " -> " << by);
  require_error(expected, [&] { manifest_from_json(text, "run/manifest.json"); });
  require_error("run/manifest.json", [&] { manifest_from_json(text, "run/manifest.json"); });
}

void refuse_to_write(const std::string& expected, void (*change)(Manifest&)) {
  Manifest manifest = sample();
  change(manifest);
  require_error(expected, [&] { to_json(manifest); });
}

} // namespace

TEST_CASE("a manifest comes back as it was, opaque texts to the letter") {
  Manifest expected = sample();
  const Manifest found = manifest_from_json(to_json(expected), "x");
  expected.scalars = "[123456789012345678901234567890, 0.10000000000000000001, 1e-300, -0]";
  REQUIRE(found == expected);
  REQUIRE((found.find("scale")->pieces == expected.tensors[1].pieces));
  REQUIRE(found.find("head") == nullptr);
  REQUIRE(found.find("none")->numel() == 0);
  REQUIRE(found.find("scale")->numel() == 1);
  REQUIRE(to_json(found) == to_json(manifest_from_json(to_json(found), "x")));
}

TEST_CASE("a small manifest is this text") {
  Manifest manifest;
  manifest.library = "zero 0.1.0";
  manifest.torch = "2.13.0";
  manifest.generation = "00000000";
  manifest.files = {{"parameters-00000000-0-0.safetensors", 8}};
  manifest.tensors = {{.name = "w", .shape = {3}, .pieces = {{0, 2, 1, 255}, {0, 0, 2, 0}}}};
  const std::string expected = R"({"format": "zero-checkpoint",
"version": 1,
"library": "zero 0.1.0",
"torch": "2.13.0",
"world_size": 1,
"stage": 0,
"generation": "00000000",
"files": [
  {"name": "parameters-00000000-0-0.safetensors", "bytes": 8}],
"tensors": [
  {"name": "w", "kind": "parameter", "dtype": "F32", "shape": [3], "pieces": [[0,0,2,"0000000000000000"], [0,2,1,"00000000000000ff"]]}],
"tied": [],
"optimizer": null,
"scalars": null,
"extra": null,
"checksum": ")";
  const std::string text = to_json(manifest);
  REQUIRE(text.substr(0, expected.size()) == expected);
  REQUIRE(text.size() == expected.size() + 16 + std::string("\"\n}\n").size());
}

TEST_CASE("what is not a manifest of this version is said") {
  require_error("not well-formed", [] { manifest_from_json("", "x"); });
  require_error("no checkpoint of zero", [] { manifest_from_json("{}", "x"); });
  require_error("no checkpoint of zero", [] { manifest_from_json("[1]", "x"); });
  require_error("no checkpoint of zero", [] { manifest_from_json(R"({"name": "app"})", "x"); });
  require_error("more than 128 deep", [] { manifest_from_json(std::string(1'000'000, '['), "x"); });
  require_error("ends with its checksum", [] {
    manifest_from_json(R"({"format": "zero-checkpoint", "version": 1})", "x");
  });
  require_error("expected 1, got 2; a newer zero", [] {
    manifest_from_json(R"({"format": "zero-checkpoint", "version": 2})", "x");
  });
  refuse("expected 1, got 0", "\"version\": 1", "\"version\": 0");
  refuse("'version': expected an integer, got \"1\"", "\"version\": 1", "\"version\": \"1\"");
  refuse("'version' stands twice", "\"stage\": 3", "\"stage\": 3, \"version\": 1");
}

TEST_CASE("fields of a manifest are checked") {
  refuse("'stage' is missing", "\"stage\": 3,", "");
  refuse("'ordre' is not known", "\"order\"", "\"ordre\"");
  refuse("'more' is not known", "\"stage\": 3", "\"stage\": 3, \"more\": 1");
  refuse("'more' is not known", "\"bytes\": 1000", "\"bytes\": 1000, \"more\": 1");
  refuse("stage: expected 0, 1, 2 or 3, got 4", "\"stage\": 3", "\"stage\": 4");
  refuse("'stage': expected an integer", "\"stage\": 3", "\"stage\": 3.5");
  refuse("'stage': expected an integer", "\"stage\": 3", "\"stage\": 18446744073709551615");
  refuse("world_size", "\"world_size\": 2", "\"world_size\": 0");
  refuse("generation", "\"generation\": \"0a1b2c3d\"", "\"generation\": \"0A1B2C3D\"");
  refuse("files[0].name", "\"generation\": \"0a1b2c3d\"", "\"generation\": \"0a1b2c3e\"");
  refuse("files[0].bytes is -1", "\"bytes\": 1000", "\"bytes\": -1");
  refuse("'bytes': expected an integer", "\"bytes\": 1000", "\"bytes\": 1e3");
  refuse("expected a list, got null", "\"tied\": [\n  [\"head\", \"scale\"]]", "\"tied\": null");
  refuse("tied: 'head' is tied to 'scala'", "[\"head\", \"scale\"]", "[\"head\", \"scala\"]");
  refuse("tied: the name 'none' stands twice", "[\"head\", \"scale\"]", "[\"none\", \"scale\"]");
  refuse("[name, tied to]", "[\"head\", \"scale\"]", "[\"head\"]");
  for (const auto* name :
       {"",
        "x",
        "manifest.json",
        "../parameters-0a1b2c3d-0-0.safetensors",
        "/etc/parameters-0a1b2c3d-0-0.safetensors",
        "parameters-0a1b2c3d-0-0.safetensors/",
        "parameters-0a1b2c3d-0-0.safetensors.tmp",
        "parameters-0a1b2c3d-00-0.safetensors",
        "parameters-0a1b2c3d--1-0.safetensors",
        "parameters-0a1b2c3d-+1-0.safetensors",
        "parameters-0a1b2c3d-0-.safetensors",
        "parameters-0a1b2c3d-0.safetensors",
        "parameters-0a1b2c3d-0-99999999999999999999.safetensors",
        "parameters-0a1b2c3-0-0.safetensors",
        "Parameters-0a1b2c3d-0-0.safetensors",
        "parameters-0a1b2c3d-0-0.safetensors\\u0000",
        "parameters-0a1b2c3d-1-0.safetensors"}) {
    refuse("files[", "parameters-0a1b2c3d-0-0.safetensors", name);
  }
}

TEST_CASE("tensors of a manifest are checked") {
  refuse("'dtype': expected a dtype, got \"F33\"", "\"F32\"", "\"F33\"");
  refuse("'kind': expected parameter, buffer or state", "\"parameter\"", "\"parameters\"");
  refuse("can't be in 'parameters-", "\"parameter\"", "\"state\"");
  refuse("a buffer can't be in 'optimizer-", "\"state\"", "\"buffer\"");
  refuse("a tensor has no name", "\"name\": \"scale\"", "\"name\": \"\"");
  refuse("'none': the name stands twice", "\"name\": \"scale\"", "\"name\": \"none\"");
  refuse("'pieces' is missing", "\"shape\": [0,5], \"pieces\"", "\"shape\": [0,5], \"peaces\"");
  const std::string shape = "\"shape\": [2,3,4]";
  refuse("'shape': expected an integer", shape, "\"shape\": [2,3,true]");
  refuse("negative or too large", shape, "\"shape\": [2,3,-4]");
  refuse("negative or too large", shape, "\"shape\": [4294967296,4294967296,1]");
  refuse("negative or too large", shape, "\"shape\": [4294967296,4294967296,0]");
  refuse("no piece has elements 24 to 30", shape, "\"shape\": [2,3,5]");
  refuse("not within its 18 elements", shape, "\"shape\": [2,3,3]");
  refuse("order [0, 2, 2] is no permutation of its 3", "[0,2,1]", "[0,2,2]");
  refuse("is no permutation", "[0,2,1]", "[0,1]");
  refuse("is no permutation", "[0,2,1]", "[0,3,1]");
  refuse("is no permutation", "[0,2,1]", "[-1,2,1]");
  refuse("in file 3, there are 3", "[1,10,14,", "[3,10,14,");
  refuse("in file -1", "[1,10,14,", "[-1,10,14,");
  refuse("overlap at element 9", "[1,10,14,", "[1,9,15,");
  refuse("no piece has elements 10 to 11", "[1,10,14,", "[1,11,13,");
  refuse("no piece has elements 23 to 24", "[1,10,14,", "[1,10,13,");
  refuse("not within", "[1,10,14,", "[1,10,15,");
  refuse("not within", "[1,10,14,", "[1,10,0,");
  refuse("not within", "[1,10,14,", "[1,10,9223372036854775807,");
  refuse("not within", "[1,10,14,", "[1,-10,14,");
  refuse("[file, begin, count, checksum]", "[1,10,14,", "[1,10,14,0,");
  refuse("16 lower-case hex digits", "\"ffffffffffffffff\"", "\"FFFFFFFFFFFFFFFF\"");
  refuse("expected a string", "\"ffffffffffffffff\"", "0");
  refuse("'scale'", "\"dtype\": \"BF16\", \"shape\": []", "\"dtype\": \"BF16\", \"shape\": [0]");
}

TEST_CASE("what can't be read is not written") {
  refuse_to_write("'extra' of the manifest: not well-formed", [](Manifest& m) { m.extra = '{'; });
  refuse_to_write("not well-formed", [](Manifest& m) { m.extra = ""; });
  refuse_to_write("not well-formed", [](Manifest& m) { m.extra = "NaN"; });
  refuse_to_write("not well-formed", [](Manifest& m) { m.scalars = "1, \"stage\": 0"; });
  refuse_to_write("not well-formed", [](Manifest& m) { m.optimizer = "\"\xFF\""; });
  refuse_to_write("UTF-8", [](Manifest& m) { m.tensors[0].name = '\xFF'; });
  refuse_to_write("version", [](Manifest& m) { m.version = 2; });
  refuse_to_write("overlap", [](Manifest& m) { m.tensors[0].pieces[1].begin = 9; });
  refuse_to_write("files[1].name", [](Manifest& m) { m.files[1].name = "../x"; });
}

TEST_CASE("names of data files are read as they are written") {
  for (const auto kind : {FileKind::parameters, FileKind::optimizer}) {
    const DataFileName name{kind, "01234567", 10, 0};
    const auto parsed = parse_data_file_name(to_string(name));
    REQUIRE(parsed);
    REQUIRE(parsed->kind == kind);
    REQUIRE(parsed->generation == "01234567");
    REQUIRE((parsed->rank == 10 && parsed->part == 0));
  }
  REQUIRE(
      to_string({FileKind::optimizer, "89abcdef", 3, 1}) == "optimizer-89abcdef-3-1.safetensors");
  REQUIRE(piece_key("a.b", 5, 7) == "a.b[5:12]");
}

TEST_CASE("a damaged manifest is refused, every time") {
  std::mt19937 random(4);
  const std::string text = to_json(sample());
  for (int round = 0; round < 1000; ++round) {
    const std::string damaged = corrupted(random, text);
    INFO(damaged);
    const std::string error = error_of([&] { manifest_from_json(damaged, "run/manifest.json"); });
    REQUIRE(error.find("run/manifest.json") != std::string::npos);
  }
}

TEST_CASE("a hostile manifest with the right checksum is refused, or is a valid one") {
  std::mt19937 random(5);
  const std::string text = to_json(sample());
  const std::string inner = text.substr(0, text.rfind(",\n\"checksum\""));
  int valid = 0;
  for (int round = 0; round < 1000; ++round) {
    const std::string hostile = seal(corrupted(random, inner, inner.size()) + "}");
    try {
      Manifest manifest = manifest_from_json(hostile, "x");
      validate(manifest, "x");
      ++valid;
    } catch (const c10::ValueError& error) {
      REQUIRE(std::string(error.what()).rfind("[zero.checkpoint] x", 0) == 0);
    }
  }
  REQUIRE(valid < 500);
}
