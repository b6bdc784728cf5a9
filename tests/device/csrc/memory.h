// Memory: each device's addresses lie in one arena that is mapped twice. Tensors have addresses of
// the first view, which nobody may touch; the device's kernels work in the second.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zsim {

char* reserve(int device, size_t bytes);  // fresh addresses of a device; pages come when touched
void set_owner(const void* address, size_t bytes, const char* name);  // for the handler's line
int device_of(const void* address);       // -1: of the host
char* kernel_view(const void* address);   // where kernels find what lies at a device address

size_t memory_limit(int device);  // ZSIM_MEMORY, until it is set
void set_memory_limit(size_t bytes, int device);

// Host memory that copies reach without the driver's staging, as cudaHostRegister makes it.
void register_host(uintptr_t address, size_t bytes);
void unregister_host(uintptr_t address);
bool is_registered(const void* address);

}  // namespace zsim
