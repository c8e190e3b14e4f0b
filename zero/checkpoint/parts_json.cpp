#include <zero/checkpoint/parts.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <zero/checkpoint/checksum.h>
#include <zero/checkpoint/json_text.h>

namespace zero::checkpoint {

std::string to_json(const std::vector<WrittenFile>& files) {
  std::string text = "[";
  for (const WrittenFile& file : files) {
    text += text.size() > 1 ? std::string_view(",") : "";
    text += json_string(file.name) + "," + std::to_string(file.bytes) + ",[";
    for (const WrittenPiece& piece : file.pieces) {
      text += text.back() == '[' ? std::string_view() : ",";
      text += json_string(piece.tensor) + "," + std::to_string(piece.begin) + "," +
          std::to_string(piece.count) + "," + std::to_string(piece.checksum);
    }
    text += ']';
  }
  text += ']';
  return text;
}

std::vector<WrittenFile> written_files_from_json(std::string_view text) {
  const std::string where = "the list of files that a rank has written";
  check_json(text, where);
  std::vector<WrittenFile> files;
  try {
    const auto json = nlohmann::json::parse(text.begin(), text.end());
    TORCH_CHECK_VALUE(
        json.is_array() && json.size() % 3 == 0,
        "[zero.checkpoint] ",
        where,
        " is not a list of threes");
    for (size_t i = 0; i < json.size(); i += 3) {
      WrittenFile file{json[i].get<std::string>(), json[i + 1].get<int64_t>()};
      const auto& pieces = json[i + 2];
      for (size_t p = 0; p < pieces.size(); p += 4) {
        file.pieces.push_back(
            {pieces.at(p).get<std::string>(),
             pieces.at(p + 1).get<int64_t>(),
             pieces.at(p + 2).get<int64_t>(),
             pieces.at(p + 3).get<uint64_t>()});
      }
      files.push_back(std::move(file));
    }
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "[zero.checkpoint] ", where, ": ", error.what());
  }
  return files;
}

} // namespace zero::checkpoint
