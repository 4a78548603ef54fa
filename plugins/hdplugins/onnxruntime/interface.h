/* The library's two interfaces: to Python, and to ONNX Runtime.
 *
 * Of ONNX Runtime's C interface it is the part that a library of custom operators calls, declared here in our own words, so
 * that a build needs no header of ONNX Runtime's.
 *
 * ONNX Runtime appends to its table of functions and to the table that a custom operator fills: a function keeps its
 * number, and a custom operator says by `version` how much of its table is filled. The numbers below hold for every release
 * from INTERFACE_VERSION on. */
#ifndef HDEXPORT_ONNXRUNTIME_INTERFACE_H
#define HDEXPORT_ONNXRUNTIME_INTERFACE_H

#include <stddef.h>
#include <stdint.h>

/* What Python and the library agree on: the functions that Python calls, and the words between planner and library. A change
 * of either raises it, here and in operators.py: Python then does not use a library that was built before. */
enum { LAUNCHER_INTERFACE = 1 };

enum { INTERFACE_VERSION = 18 }; /* of ONNX Runtime 1.18, which has the newest function below */

typedef struct Api Api; /* ONNX Runtime's table: pointers to functions, by number */
typedef struct Status Status;
typedef struct Value Value;
typedef struct NodeInfo NodeInfo;
typedef struct CallContext CallContext;
typedef struct ShapeContext ShapeContext;
typedef struct SessionOptions SessionOptions;
typedef struct Domain Domain;
typedef struct Memory Memory;
typedef struct Allocator Allocator;
typedef struct TensorInfo TensorInfo;

typedef struct {
    const Api *(*get_api)(uint32_t version);
    const char *(*get_version)(void);
} ApiBase;

/* Every function: its name, number, result and parameters. */
#define INTERFACE_FUNCTIONS(X) \
    X(CreateStatus, 0, Status *, (int code, const char *message)) \
    X(CreateCustomOpDomain, 26, Status *, (const char *name, Domain **)) \
    X(CustomOpDomain_Add, 27, Status *, (Domain *, const void *operator)) \
    X(AddCustomOpDomain, 28, Status *, (SessionOptions *, Domain *)) \
    X(GetTensorMutableData, 51, Status *, (Value *, void **)) \
    X(GetTensorElementType, 60, Status *, (const TensorInfo *, int *)) \
    X(GetDimensionsCount, 61, Status *, (const TensorInfo *, size_t *)) \
    X(GetDimensions, 62, Status *, (const TensorInfo *, int64_t *, size_t)) \
    X(GetTensorTypeAndShape, 65, Status *, (const Value *, TensorInfo **)) \
    X(AllocatorAlloc, 75, Status *, (Allocator *, size_t, void **)) \
    X(AllocatorFree, 76, Status *, (Allocator *, void *)) \
    X(KernelInfoGetAttribute_float, 85, Status *, (const NodeInfo *, const char *, float *)) \
    X(KernelInfoGetAttribute_int64, 86, Status *, (const NodeInfo *, const char *, int64_t *)) \
    X(KernelContext_GetInputCount, 88, Status *, (const CallContext *, size_t *)) \
    X(KernelContext_GetInput, 90, Status *, (const CallContext *, size_t, const Value **)) \
    X(KernelContext_GetOutput, 91, Status *, (CallContext *, size_t, const int64_t *, size_t, Value **)) \
    X(ReleaseStatus, 93, void, (Status *)) \
    X(ReleaseTensorTypeAndShapeInfo, 99, void, (TensorInfo *)) \
    X(ReleaseAllocator, 132, void, (Allocator *)) \
    X(KernelInfoGetAttributeArray_int64, 163, Status *, (const NodeInfo *, const char *, int64_t *, size_t *)) \
    X(KernelContext_GetGPUComputeStream, 193, Status *, (const CallContext *, void **)) \
    X(GetTensorMemoryInfo, 194, Status *, (const Value *, const Memory **)) \
    X(KernelContext_GetAllocator, 253, Status *, (const CallContext *, const Memory *, Allocator **)) \
    X(ShapeInferContext_GetInputTypeShape, 268, Status *, (const ShapeContext *, size_t, TensorInfo **)) \
    X(ShapeInferContext_SetOutputTypeShape, 270, Status *, (const ShapeContext *, size_t, const TensorInfo *)) \
    X(KernelContext_GetScratchBuffer, 277, Status *, (const CallContext *, const Memory *, size_t, void **))

#define DECLARE(name, number, result, parameters) typedef result(*name##_function) parameters;
INTERFACE_FUNCTIONS(DECLARE)
#undef DECLARE

#define NUMBER(name, number, result, parameters) name##_number = number,
enum { INTERFACE_FUNCTIONS(NUMBER) };
#undef NUMBER

/* The table that a custom operator fills, in ONNX Runtime's order. Entries that are 0 are not called in this version. */
typedef struct CustomOperator CustomOperator;
struct CustomOperator {
    uint32_t version;
    void *(*create_without_status)(const CustomOperator *, const Api *, const NodeInfo *);
    const char *(*name)(const CustomOperator *);
    const char *(*provider)(const CustomOperator *);
    int (*input_type)(const CustomOperator *, size_t);
    size_t (*input_count)(const CustomOperator *);
    int (*output_type)(const CustomOperator *, size_t);
    size_t (*output_count)(const CustomOperator *);
    void (*compute_without_status)(void *, CallContext *);
    void (*destroy)(void *);
    int (*input_kind)(const CustomOperator *, size_t);
    int (*output_kind)(const CustomOperator *, size_t);
    int (*input_memory)(const CustomOperator *, size_t);
    int (*variadic_inputs_least)(const CustomOperator *);
    int (*variadic_inputs_alike)(const CustomOperator *);
    int (*variadic_outputs_least)(const CustomOperator *);
    int (*variadic_outputs_alike)(const CustomOperator *);
    Status *(*create)(const CustomOperator *, const Api *, const NodeInfo *, void **);
    Status *(*compute)(void *, CallContext *);
    Status *(*infer_shapes)(const CustomOperator *, ShapeContext *);
    int (*first_version)(const CustomOperator *);
    int (*last_version)(const CustomOperator *);
    size_t (*in_place)(int **, int **);
    void (*release_in_place)(int *, int *);
    size_t (*aliases)(int **, int **);
    void (*release_aliases)(int *, int *);
};

enum { KIND_REQUIRED = 0, KIND_OPTIONAL = 1 };
enum { MEMORY_OF_PROVIDER = 0 };
enum { STATUS_FAILED = 1 };

#endif
