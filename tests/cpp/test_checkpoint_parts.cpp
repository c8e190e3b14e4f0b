// The pieces of several ranks, cut into small files, and put together again.

#include <cstring>
#include <map>

#include "checkpoint_files.h"

#include <zero/checkpoint/data_files.h>
#include <zero/checkpoint/parts.h>

using namespace zero::checkpoint;
using namespace zero::test;

namespace {

int64_t itemsize(const OwnPiece& piece) {
  return static_cast<int64_t>(c10::elementSize(piece.dtype));
}

} // namespace

TEST_CASE("parts hold all pieces in order, and not more than their bytes") {
  std::mt19937 random(11);
  const std::vector dtypes = {
      c10::ScalarType::Double, c10::ScalarType::Float, c10::ScalarType::Bool};
  for (int round = 0; round < 500; ++round) {
    std::vector<OwnPiece> pieces;
    for (size_t i = below(random, 6); i-- > 0;) {
      pieces.push_back(
          {std::string(1 + i, 'w'),
           dtypes[below(random, 3)],
           static_cast<int64_t>(below(random, 5)),
           static_cast<int64_t>(below(random, 30))});
    }
    std::stable_sort(pieces.begin(), pieces.end(), written_before);
    const auto part_bytes = static_cast<int64_t>(below(random, 80));
    std::vector<OwnPiece> joined;
    for (const auto& part : cut_into_parts(pieces, part_bytes)) {
      int64_t bytes = 0;
      for (const OwnPiece& piece : part) {
        REQUIRE(piece.count > 0);
        bytes += piece.count * itemsize(piece);
        if (!joined.empty() && joined.back().tensor == piece.tensor) {
          REQUIRE(joined.back().begin + joined.back().count == piece.begin);
          joined.back().count += piece.count;
        } else {
          joined.push_back(piece);
        }
      }
      REQUIRE(bytes > 0);
      REQUIRE((bytes <= part_bytes || (part.size() == 1 && part[0].count == 1)));
    }
    std::erase_if(pieces, [](const OwnPiece& piece) { return piece.count == 0; });
    REQUIRE(joined.size() == pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      REQUIRE(joined[i].tensor == pieces[i].tensor);
      REQUIRE(joined[i].begin == pieces[i].begin);
      REQUIRE(joined[i].count == pieces[i].count);
    }
  }
}

TEST_CASE("what ranks wrote in parts is read whole") {
  std::mt19937 random(12);
  for (int round = 0; round < 20; ++round) {
    const TemporaryDirectory folder;
    const std::string generation = new_generation();
    const auto ranks = static_cast<int64_t>(1 + below(random, 4));
    Manifest manifest{.world_size = ranks, .generation = generation};
    std::map<std::string, std::string> bytes;
    for (const auto dtype :
         {c10::ScalarType::Float, c10::ScalarType::Long, c10::ScalarType::Bool}) {
      for (const int64_t numel : {0, 1, 3, 500}) {
        const std::string name = std::string(c10::toString(dtype)) + std::to_string(numel);
        manifest.tensors.push_back({.name = name, .dtype = dtype, .shape = {numel}});
        bytes[name] = random_bytes(random, numel * c10::elementSize(dtype));
      }
    }
    SaveDirectory directory(folder / "x", generation);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      std::vector<OwnPiece> pieces;
      for (const ManifestTensor& tensor : manifest.tensors) {
        const int64_t begin = tensor.numel() * rank / ranks;
        const int64_t end = tensor.numel() * (rank + 1) / ranks;
        pieces.push_back({tensor.name, tensor.dtype, begin, end - begin});
      }
      std::stable_sort(pieces.begin(), pieces.end(), written_before);
      std::string data;
      for (const OwnPiece& piece : pieces) {
        data += bytes[piece.tensor].substr(
            piece.begin * itemsize(piece), piece.count * itemsize(piece));
      }
      const auto part_bytes = static_cast<int64_t>(50 + below(random, 2000));
      PartWriter writer(directory, {FileKind::parameters, rank, part_bytes}, pieces);
      for (size_t at = 0; at < data.size();) {
        const size_t portion = std::min(data.size() - at, below(random, 300));
        writer.write(data.data() + at, static_cast<int64_t>(portion));
        at += portion;
      }
      require_error("1 bytes more", [&] { writer.write("x", 1); });
      const auto files = writer.finish();
      REQUIRE(files.size() >= data.size() / part_bytes);
      REQUIRE((written_files_from_json(to_json(files)) == files));
      add_files(manifest, files);
    }
    directory.commit(to_json(manifest));
    const Manifest found = read_manifest(folder / "x");
    REQUIRE(verify(folder / "x", found).empty());
    DataFiles files(folder / "x", found);
    for (const ManifestTensor& tensor : found.tensors) {
      std::string whole(bytes[tensor.name].size(), '\0');
      files.read(tensor, {0, tensor.numel()}, {}, whole.data());
      REQUIRE(whole == bytes[tensor.name]);
    }
  }
}

TEST_CASE("parts that are not complete are an error, and removed") {
  const TemporaryDirectory folder;
  SaveDirectory directory(folder / "x", "00000000");
  const std::vector<OwnPiece> pieces = {
      {"a", c10::ScalarType::Byte, 0, 10}, {"b", c10::ScalarType::Byte, 0, 5}};
  {
    PartWriter writer(directory, {FileKind::optimizer, 3, 4}, pieces);
    require_error("of 'a' at the least", [&] { writer.finish(); });
    writer.write("123456", 6);
    REQUIRE(names_in(open_directory(folder / "x")).size() == 2);
    require_error("of 'a' at the least", [&] { writer.finish(); });
    writer.write("123456", 6);
    require_error("of 'b' at the least", [&] { writer.finish(); });
  }
  REQUIRE(std::filesystem::is_empty(folder / "x"));
  REQUIRE(PartWriter(directory, {}, {}).finish().empty());
  REQUIRE(PartWriter(directory, {}, {{"a", c10::ScalarType::Byte, 5, 0}}).finish().empty());
  require_error(
      "a range of 'a'", [&] { PartWriter(directory, {}, {{"a", c10::ScalarType::Byte, 5, -1}}); });
  Manifest manifest{.generation = "00000000", .tensors = {{.name = "a", .shape = {1}}}};
  require_error("a piece of 'b', which the manifest does not have", [&] {
    add_files(manifest, {{"parameters-00000000-0-0.safetensors", 8, {{"b", 0, 1, 0}}}});
  });
  for (const auto* text : {"", "{}", "[1]", "[1,2,3]", "[\"x\",1,[\"a\",0]]", "[\"x\",\"1\",[]]"}) {
    require_error("the list of files", [&] { written_files_from_json(text); });
  }
}

TEST_CASE("a read in part notices damage elsewhere in its piece, when it is to") {
  const TemporaryDirectory folder;
  SaveDirectory directory(folder / "x", "00000000");
  Manifest manifest{
      .generation = "00000000",
      .tensors = {{.name = "w", .dtype = c10::ScalarType::Byte, .shape = {2'000'000}}}};
  std::mt19937 random(13);
  const std::string data = random_bytes(random, 2'000'000);
  PartWriter writer(
      directory, {.part_bytes = 1'500'000}, {{"w", c10::ScalarType::Byte, 0, 2'000'000}});
  writer.write(data.data(), 2'000'000);
  add_files(manifest, writer.finish());
  directory.commit(to_json(manifest));
  const ManifestTensor& tensor = manifest.tensors[0];
  const std::string file = folder / "x/parameters-00000000-0-0.safetensors";
  std::string part(1000, '\0');

  DataFiles early(folder / "x", manifest);
  early.read(tensor, {1'499'500, 1'500'500}, {}, part.data()); // of both pieces
  REQUIRE(part == data.substr(1'499'500, 1000));
  std::string bytes = read_file(file);
  bytes[bytes.size() - 700'000] = static_cast<char>(bytes[bytes.size() - 700'000] ^ 4);
  {
    std::ofstream in_place(file, std::ios::binary | std::ios::in);
    in_place << bytes;
  }
  for (const int64_t begin : {0, 900'000, 1'499'000}) {
    DataFiles checked(folder / "x", manifest);
    require_error("parameters-00000000-0-0.safetensors': 'w[0:1500000]' is damaged", [&] {
      checked.read(tensor, {begin, begin + 1000}, {}, part.data());
    });
    checked.read(tensor, {1'900'000, 1'901'000}, {}, part.data());
    REQUIRE(part == data.substr(1'900'000, 1000));
    DataFiles trusting(folder / "x", manifest, Check::none);
    trusting.read(tensor, {begin, begin + 1000}, {}, part.data());
    REQUIRE(part == data.substr(begin, 1000));
    early.read(tensor, {begin, begin + 1000}, {}, part.data()); // was compared before
  }
}
