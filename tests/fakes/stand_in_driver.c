/* CUDA's driver library on a machine without a GPU, with the functions that the launcher of ONNX Runtime's operators calls:
 * launches go on to a function of the test, and the context is what the test says, or refused with the code that the test
 * says. As CUDA, it does not start in a fork. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

typedef unsigned Number;
typedef int (*Launched)(uint64_t function, Number x, Number y, Number z, Number threads, Number shared_bytes, uint64_t stream,
                        uint64_t parameters);

static Launched launched;
static uintptr_t context;
static _Thread_local uintptr_t context_of_thread;
static pid_t process;
static int refusal;

enum { NOT_INITIALIZED = 3 };

void stand_in_launched(Launched function) { launched = function, process = getpid(); }

void stand_in_context(uint64_t number, int of_thread) {
    if (of_thread)
        context_of_thread = (uintptr_t)number;
    else
        context = (uintptr_t)number;
}

void stand_in_refuses(int code) { refusal = code; }

static int is_fork(void) { return process && process != getpid(); }

int cuCtxGetCurrent(void **current) {
    if (is_fork()) return NOT_INITIALIZED;
    if (refusal) return refusal;
    *current = (void *)(context_of_thread ? context_of_thread : context);
    return 0;
}

int cuInit(Number flags) { return is_fork() ? NOT_INITIALIZED : (int)flags; }

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
    if (is_fork()) return NOT_INITIALIZED;
    if (threads_y != 1 || threads_z != 1 || extra) return 1;
    return launched((uint64_t)(uintptr_t)function, x, y, z, threads, shared_bytes, (uint64_t)(uintptr_t)stream,
                    (uint64_t)(uintptr_t)parameters);
}
