#pragma once

// JSON as text: what this folder needs besides a parser. Internal.

#include <string>
#include <string_view>

namespace zero::checkpoint {

// Throws c10::ValueError "[zero.checkpoint] WHERE: ..." unless `text` is well-formed
// UTF-8 JSON, nested at most 128 deep, without a name that an object has twice.
void check_json(std::string_view text, const std::string& where);

// The text of a member's value in a checked JSON object, as it stands there: numbers
// of any length and floats keep every digit. Empty where there is none.
std::string_view member_text(std::string_view object, std::string_view name);

// `text` in quotes, escaped. Throws c10::ValueError where it is not UTF-8.
std::string json_string(const std::string& text);

} // namespace zero::checkpoint
