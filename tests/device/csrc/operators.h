// Operators: the boxed kernel that all of them share, and counts of what ran.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "torch_headers.h"

namespace zsim {

// Takes the arguments of `op` from the stack and puts the results there; the CPU's kernel runs later.
void run_on_lane(const c10::OperatorHandle& op, torch::jit::Stack* stack);

std::map<std::string, uint64_t> synchronous_operators();  // those that made the host wait
std::map<std::string, uint64_t> launched_operators();
void count_synchronous(const std::string& name);

}  // namespace zsim
