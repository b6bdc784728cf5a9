// Settings that are read once, when a process first asks for them.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace zsim {

inline uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace zsim
