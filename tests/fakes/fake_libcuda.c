/* A CUDA driver library without a GPU, for cuda-python to load: it prints each launch as a GPU would read it.

   Only what `hdplugins.cuda_launch` calls is there. The kernel that it "runs" takes a pointer, an i32, an fp32 and two
   null pointers. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

typedef int Result;

enum { SUCCESS = 0, NOT_FOUND = 500, LAUNCH_FAILED = 719, COMPUTE_CAPABILITY_MAJOR = 75 };

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuCtxGetCurrent(void **context) { *context = (void *)0xC0; return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == COMPUTE_CAPABILITY_MAJOR ? 8 : 9;
    return SUCCESS;
}

Result cuModuleLoadData(void **module, const void *image) {
    printf("image %.9s\n", (const char *)image);
    *module = (void *)0xA0;
    return SUCCESS;
}

Result cuModuleGetFunction(void **function, void *module, const char *name) {
    printf("function %s of %p\n", name, module);
    *function = (void *)0xB0;
    return SUCCESS;
}

Result cuFuncSetAttribute(void *function, int attribute, int value) {
    printf("attribute %d of %p is %d\n", attribute, function, value);
    return SUCCESS;
}

Result cuGetErrorString(Result code, const char **text) { *text = "the reason"; return SUCCESS; }

Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared_bytes, void *stream, void **parameters, void **extra) {
    printf("launch %p grid %u %u %u threads %u %u %u shared %u stream %p extra %d\n", function, gx, gy, gz, bx, by, bz,
           shared_bytes, stream, extra != NULL);
    printf("arguments %p %d %g %d %d\n", *(void **)parameters[0], *(int *)parameters[1], *(float *)parameters[2],
           *(void **)parameters[3] != NULL, *(void **)parameters[4] != NULL);
    fflush(stdout);
    return stream == NULL ? LAUNCH_FAILED : SUCCESS;
}

/* How cuda-python finds the functions above. */
Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = self == NULL ? NULL : dlsym(self, name);
    if (status != NULL) *status = *function == NULL;
    return *function == NULL ? NOT_FOUND : SUCCESS;
}

Result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
