/* CUDA's driver library on a machine without a GPU, with the functions that the launcher of ONNX Runtime's operators calls:
 * launches go on to a function of the test, and the context is what the test says. */
#include <stdint.h>
#include <stdio.h>

typedef unsigned Number;
typedef int (*Launched)(uint64_t function, Number x, Number y, Number z, Number threads, Number shared_bytes, uint64_t stream,
                        uint64_t parameters);

static Launched launched;
static uintptr_t context;

void stand_in_launched(Launched function) { launched = function; }
void stand_in_context(uint64_t number) { context = (uintptr_t)number; }

int cuCtxGetCurrent(void **current) {
    *current = (void *)context;
    return 0;
}

int cuInit(Number flags) { return (int)flags; }

int cuDeviceGetCount(int *count) {
    *count = 0; /* tests say which GPU there is */
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    static _Thread_local char said[64];
    snprintf(said, sizeof said, "the reason for %d", code);
    *text = said;
    return 0;
}

int cuLaunchKernel(void *function, Number x, Number y, Number z, Number threads, Number threads_y, Number threads_z,
                   Number shared_bytes, void *stream, void **parameters, void **extra) {
    if (threads_y != 1 || threads_z != 1 || extra) return 1;
    return launched((uint64_t)(uintptr_t)function, x, y, z, threads, shared_bytes, (uint64_t)(uintptr_t)stream,
                    (uint64_t)(uintptr_t)parameters);
}
