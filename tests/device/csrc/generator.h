// Random numbers: a generator of the device gives each launch a seed, for a generator of the CPU.
#pragma once
#include "torch_headers.h"

namespace zsim {

at::Generator new_generator(int device);
const at::Generator& default_generator(int device);
uint64_t next_seed(const at::Generator& generator);

}  // namespace zsim
