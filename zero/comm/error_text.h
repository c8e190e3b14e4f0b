#pragma once

// What an exception says, without torch's backtrace.

#include <exception>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>

namespace zero::comm {

inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& other) {
    return other.what();
  } catch (...) {
    return "an unknown error";
  }
}

// What peers are told goes into their errors, which have a prefix of their own.
inline std::string_view without_prefix(std::string_view text) {
  constexpr std::string_view kPrefix = "[zero.comm] ";
  return text.substr(0, kPrefix.size()) == kPrefix ? text.substr(kPrefix.size()) : text;
}

// What a rank that stays away, or does something else, may have lacked.
inline constexpr const char* kUnevenData =
    "; ranks that run out of batches at different steps train inside zero.join";

inline std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

} // namespace zero::comm
