/* Operators of ONNX Runtime whose work is launches of compiled kernels. One library serves every operator.
 *
 * A planner, which is Python, is asked what to launch for the types and shapes of a call. The library keeps the answer, so
 * that Python is entered once for each new shape. Launches go to ONNX Runtime's stream by CUDA's driver, and nothing waits.
 *
 * A registry is what one session registers: its operators, its planner and the answers that the planner gave. A process
 * may have sessions of several bundles, whose kernels lie in different folders.
 *
 * Neither CUDA's toolkit nor a header of ONNX Runtime is needed:
 *     cc -O2 -std=c11 -fexceptions -shared -fPIC -fvisibility=hidden -o launcher.so launcher.c -ldl -lpthread */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interface.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    MOST_INPUTS = 16,
    MOST_OUTPUTS = 4,
    MOST_AXES = 16,
    MOST_ATTRIBUTES = 16,
    MOST_ASKED_WORDS = 512,
    MOST_ANSWERED_WORDS = 8192,
    MOST_ARGUMENTS = 96,
    MOST_CALLS = 4096, /* answers of a registry; with more, all are forgotten and asked for again */
    BUCKETS = 1024,
    NAME_BYTES = 192,
    ERROR_BYTES = 2048,
    SHAPE_BYTES = 256,
    POINTER_ALIGNMENT = 16, /* the kernels are compiled for it: a wider load elsewhere would break the whole context */
};

enum { FIELD_INT, FIELD_INTS, FIELD_FLOAT };
enum { ARGUMENT_INPUT, ARGUMENT_OUTPUT, ARGUMENT_SCRATCH, ARGUMENT_VALUE, ARGUMENT_KINDS };

/* What a planner is asked, in words of 64 bits: the operator's number | the CUDA context | for each attribute, in the order
 * of their declaration: the number of its values, and these (of a float, its bits) | the number of inputs, and for each:
 * type (0 where the input is left out), number of axes, sizes.
 *
 * What it answers: bytes of scratch memory | for each output but the first, which has the shape of the first input: number
 * of axes, sizes | the number of launches, and for each: the driver's function, the grid's x, y and z, threads, bytes of
 * shared memory, the number of arguments, and for each: kind, value. The value is the number of an input or output, an
 * offset in the scratch memory, or a scalar's bits.
 *
 * It returns the number of words; -1 for a refusal, whose reason is in `error`. */
typedef int64_t (*Planner)(const int64_t *asked, int64_t asked_words, int64_t *answer, int64_t room, char *error,
                           int64_t error_bytes);

typedef struct Registry Registry;

typedef struct Operator {
    CustomOperator base; /* first: ONNX Runtime passes its address */
    struct Operator *next;
    Registry *registry;
    char name[NAME_BYTES], provider[NAME_BYTES];
    int number, inputs, required, outputs, attributes;
    int input_types[MOST_INPUTS], output_types[MOST_OUTPUTS];
    char attribute_names[MOST_ATTRIBUTES][NAME_BYTES];
    int attribute_types[MOST_ATTRIBUTES];
} Operator;

/* One node of a graph. */
typedef struct {
    const Operator *operator;
    int64_t words;
    int64_t attributes[MOST_ASKED_WORDS];
} Node;

typedef struct Call {
    struct Call *next;
    uint64_t hash;
    int64_t asked_words, answer_words;
    int64_t words[]; /* what was asked, then the answer */
} Call;

/* Of a call. */
typedef struct {
    uint64_t inputs[MOST_INPUTS]; /* addresses, 0 for one that is left out */
    int count;
    int64_t axes[MOST_AXES]; /* of the first input */
    size_t rank;
    const Value *first;
} Inputs;

struct Registry {
    Planner planner;
    Domain *domain;
    Operator *operators;
    int count;
    pthread_mutex_t lock; /* of the calls */
    Call *calls[BUCKETS];
    int call_count;
};

static const Api *api;
static _Thread_local Registry *registering; /* what RegisterCustomOps, in the same thread, gives a session */

#define ORT(name) (((name##_function *)(uintptr_t)api)[name##_number])
#define TRY(call) \
    do { \
        Status *problem_ = (call); \
        if (problem_) return problem_; \
    } while (0)

/* --- CUDA's driver, opened when the first node is made --- */

static struct {
    const char *problem;
    int (*get_context)(void **);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*explain)(int, const char **);
} driver;

static void open_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        driver.problem = "libcuda.so.1, NVIDIA's driver, cannot be opened";
        return;
    }
    *(void **)&driver.get_context = dlsym(library, "cuCtxGetCurrent");
    *(void **)&driver.launch = dlsym(library, "cuLaunchKernel");
    *(void **)&driver.explain = dlsym(library, "cuGetErrorString");
    if (!driver.get_context || !driver.launch || !driver.explain) driver.problem = "libcuda.so.1 lacks functions";
}

/* --- errors --- */

/* "[8, 4096, 12, 64]" of the first input. */
static const char *shape_of(const Inputs *inputs, char text[SHAPE_BYTES]) {
    size_t length = 0;
    text[0] = 0;
    for (size_t i = 0; i < inputs->rank && length < SHAPE_BYTES; i++) {
        int written = snprintf(text + length, SHAPE_BYTES - length, "%s%lld", i ? ", " : "[", (long long)inputs->axes[i]);
        length += written > 0 ? (size_t)written : 0;
    }
    if (length < SHAPE_BYTES) snprintf(text + length, SHAPE_BYTES - length, "]");
    return text;
}

/* An error that names the operator, and the shape of the call's first input where there is a call. */
static Status *failed(const Operator *operator, const Inputs *inputs, const char *format, ...) {
    char said[ERROR_BYTES], shape[SHAPE_BYTES], message[ERROR_BYTES + NAME_BYTES + SHAPE_BYTES + 16];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(said, sizeof said, format, arguments);
    va_end(arguments);
    const char *call = inputs ? " on " : "";
    snprintf(message, sizeof message, "%s%s%s: %s", operator->name, call, inputs ? shape_of(inputs, shape) : "", said);
    return ORT(CreateStatus)(STATUS_FAILED, message);
}

static const char *explained(int code) {
    const char *said = NULL;
    return driver.explain(code, &said) || !said ? "no explanation" : said;
}

/* --- what was answered before --- */

static uint64_t hash_of(const int64_t *words, int64_t count) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < count; i++) {
        hash = (hash ^ (uint64_t)words[i]) * 1099511628211u;
        hash ^= hash >> 31;
    }
    return hash;
}

/* Copies the answer to what is asked; returns its words, 0 for none. */
static int64_t recall(Registry *registry, const int64_t *asked, int64_t words, uint64_t hash, int64_t *answer) {
    int64_t found = 0;
    pthread_mutex_lock(&registry->lock);
    for (const Call *call = registry->calls[hash % BUCKETS]; call && !found; call = call->next) {
        if (call->hash == hash && call->asked_words == words && !memcmp(call->words, asked, 8 * (size_t)words)) {
            found = call->answer_words;
            memcpy(answer, call->words + words, 8 * (size_t)found);
        }
    }
    pthread_mutex_unlock(&registry->lock);
    return found;
}

static void forget(Registry *registry) {
    for (int i = 0; i < BUCKETS; i++) {
        while (registry->calls[i]) {
            Call *call = registry->calls[i];
            registry->calls[i] = call->next;
            free(call);
        }
    }
    registry->call_count = 0;
}

static void remember(Registry *registry, const int64_t *asked, int64_t asked_words, uint64_t hash, const int64_t *answer,
                     int64_t answer_words) {
    Call *call = malloc(sizeof *call + 8 * (size_t)(asked_words + answer_words));
    if (!call) return; /* the planner is asked again the next time */
    call->hash = hash, call->asked_words = asked_words, call->answer_words = answer_words;
    memcpy(call->words, asked, 8 * (size_t)asked_words);
    memcpy(call->words + asked_words, answer, 8 * (size_t)answer_words);
    pthread_mutex_lock(&registry->lock);
    if (registry->call_count == MOST_CALLS) forget(registry);
    call->next = registry->calls[hash % BUCKETS];
    registry->calls[hash % BUCKETS] = call;
    registry->call_count++;
    pthread_mutex_unlock(&registry->lock);
}

/* --- a planner's answer --- */

enum { LAUNCH_WORDS = 7 };

static int is_argument(int64_t kind, int64_t value, int64_t scratch_bytes, int inputs, int outputs) {
    if (kind == ARGUMENT_INPUT) return value >= 0 && value < inputs;
    if (kind == ARGUMENT_OUTPUT) return value >= 0 && value < outputs;
    if (kind == ARGUMENT_SCRATCH) return value >= 0 && value < scratch_bytes;
    return kind == ARGUMENT_VALUE;
}

/* What is wrong with an answer; NULL where every number of it can be relied on. */
static const char *flaw_of(const int64_t *answer, int64_t words, int inputs, int outputs) {
    const int64_t *at = answer + 1, *end = answer + words;
    if (words < 1 || answer[0] < 0) return "it lacks the bytes of scratch memory";
    for (int output = 1; output < outputs; output++) {
        int64_t axes = at < end ? *at++ : -1;
        if (axes < 0 || axes > MOST_AXES || end - at < axes) return "the shape of an output is cut off, or too long";
        for (; axes > 0; axes--, at++)
            if (*at < 0 || *at > INT32_MAX) return "a size of an output is out of range";
    }
    int64_t launches = at < end ? *at++ : -1;
    if (launches < 0) return "it lacks the launches";
    for (; launches > 0; launches--) {
        if (end - at < LAUNCH_WORDS) return "a launch is cut off";
        for (int i = 1; i < 6; i++)
            if (at[i] < 0 || at[i] > INT32_MAX) return "a grid, a number of threads or a size is out of range";
        int64_t arguments = at[6];
        if (!at[0] || !at[4]) return "a launch has no function, or no threads";
        if (arguments < 0 || arguments > MOST_ARGUMENTS || end - at - LAUNCH_WORDS < 2 * arguments)
            return "the arguments of a launch are cut off, or too many";
        for (at += LAUNCH_WORDS; arguments > 0; arguments--, at += 2)
            if (!is_argument(at[0], at[1], answer[0], inputs, outputs)) return "an argument is none of the call's";
    }
    return at == end ? NULL : "there are words behind it";
}

/* --- a call --- */

/* Writes the inputs behind what is asked. */
static Status *describe_inputs(const Operator *operator, const CallContext *context, int64_t *asked, int64_t *words,
                               Inputs *found) {
    size_t count;
    TRY(ORT(KernelContext_GetInputCount)(context, &count));
    if (count > MOST_INPUTS) return failed(operator, NULL, "it has %zu inputs; %d are the most", count, MOST_INPUTS);
    found->count = (int)count;
    asked[(*words)++] = (int64_t)count;
    for (size_t i = 0; i < count; i++) {
        const Value *value = NULL;
        TRY(ORT(KernelContext_GetInput)(context, i, &value));
        found->inputs[i] = 0;
        int type = 0;
        size_t rank = 0;
        int64_t sizes[MOST_AXES];
        if (value) {
            TensorInfo *info;
            void *data;
            TRY(ORT(GetTensorTypeAndShape)(value, &info));
            Status *problem = ORT(GetTensorElementType)(info, &type);
            if (!problem) problem = ORT(GetDimensionsCount)(info, &rank);
            if (!problem && rank > MOST_AXES)
                problem = failed(operator, NULL, "input %zu has %zu axes; %d are the most", i, rank, MOST_AXES);
            if (!problem) problem = ORT(GetDimensions)(info, sizes, rank);
            ORT(ReleaseTensorTypeAndShapeInfo)(info);
            if (problem) return problem;
            TRY(ORT(GetTensorMutableData)((Value *)(uintptr_t)value, &data));
            found->inputs[i] = (uint64_t)(uintptr_t)data;
        }
        if (*words + 2 + (int64_t)rank > MOST_ASKED_WORDS) return failed(operator, NULL, "its inputs have too many axes");
        asked[(*words)++] = type;
        asked[(*words)++] = (int64_t)rank;
        memcpy(asked + *words, sizes, 8 * rank);
        *words += (int64_t)rank;
        if (i == 0) {
            if (!value) return failed(operator, NULL, "its first input is left out");
            found->first = value, found->rank = rank;
            memcpy(found->axes, sizes, 8 * rank);
        }
    }
    return NULL;
}

/* Makes an output with that shape; its address is 0 where the node leaves it out. */
static Status *make_output(CallContext *context, int number, const int64_t *axes, size_t rank, uint64_t *addresses) {
    Value *value = NULL;
    void *data = NULL;
    TRY(ORT(KernelContext_GetOutput)(context, (size_t)number, axes, rank, &value));
    if (value) TRY(ORT(GetTensorMutableData)(value, &data));
    addresses[number] = (uint64_t)(uintptr_t)data;
    return NULL;
}

/* Launches the kernels; `at` is the number of launches in an answer, and what follows. */
static Status *launch_all(const Operator *operator, const int64_t *at, void *stream, const Inputs *inputs,
                          const uint64_t *outputs, uint64_t scratch) {
    int64_t launches = *at++;
    for (int64_t number = 0; number < launches; number++) {
        const int64_t *head = at;
        uint64_t slots[MOST_ARGUMENTS];
        void *parameters[MOST_ARGUMENTS];
        at += LAUNCH_WORDS;
        for (int64_t i = 0; i < head[6]; i++, at += 2) {
            uint64_t value = (uint64_t)at[1];
            if (at[0] != ARGUMENT_VALUE) {
                value = at[0] == ARGUMENT_INPUT    ? inputs->inputs[at[1]]
                        : at[0] == ARGUMENT_OUTPUT ? outputs[at[1]]
                                                   : scratch + (uint64_t)at[1];
                if (!value || value % POINTER_ALIGNMENT)
                    return failed(operator, inputs, "a tensor is at the address %#llx; kernels need multiples of %d",
                                  (unsigned long long)value, POINTER_ALIGNMENT);
            }
            slots[i] = value; /* little-endian: a scalar of 32 bits is the slot's first half */
            parameters[i] = &slots[i];
        }
        if (!head[1] || !head[2] || !head[3]) continue; /* an empty batch */
        int code = driver.launch((void *)(uintptr_t)head[0], (unsigned)head[1], (unsigned)head[2], (unsigned)head[3],
                                 (unsigned)head[4], 1, 1, (unsigned)head[5], stream, parameters, NULL);
        if (code)
            return failed(operator, inputs, "CUDA error %d at launch %lld: %s", code, (long long)number, explained(code));
    }
    return NULL;
}

static Status *launch_with_scratch(const Operator *operator, const CallContext *context, size_t scratch_bytes,
                                   const int64_t *launches, const Inputs *inputs, const uint64_t *outputs) {
    void *stream = NULL, *scratch = NULL;
    TRY(ORT(KernelContext_GetGPUComputeStream)(context, &stream));
    if (!scratch_bytes) return launch_all(operator, launches, stream, inputs, outputs, 0);
    const Memory *memory;
    Allocator *allocator;
    TRY(ORT(GetTensorMemoryInfo)(inputs->first, &memory));
    TRY(ORT(KernelContext_GetAllocator)(context, memory, &allocator));
    /* A scratch buffer belongs to the stream: given back once all is queued, it is not handed out to another stream while
     * the kernels are at work. Providers without a stream, such as the CPU's, crash there in ONNX Runtime 1.31. Where the
     * memory is short, ONNX Runtime throws through this function, as of no other call, and catches it around the node:
     * hence -fexceptions, without which the process would end. The allocator, a few bytes, is not released then. */
    Status *problem = stream ? ORT(KernelContext_GetScratchBuffer)(context, memory, scratch_bytes, &scratch)
                             : ORT(AllocatorAlloc)(allocator, scratch_bytes, &scratch);
    if (!problem) problem = launch_all(operator, launches, stream, inputs, outputs, (uint64_t)(uintptr_t)scratch);
    if (scratch) {
        Status *freeing = ORT(AllocatorFree)(allocator, scratch);
        if (freeing) ORT(ReleaseStatus)(freeing);
    }
    ORT(ReleaseAllocator)(allocator);
    return problem;
}

/* Makes every output but the first one, without values: [0]. */
static Status *make_empty(const Operator *operator, CallContext *context) {
    const int64_t nothing = 0;
    uint64_t outputs[MOST_OUTPUTS];
    for (int i = 1; i < operator->outputs; i++) TRY(make_output(context, i, &nothing, 1, outputs));
    return NULL;
}

static Status *compute(void *opaque, CallContext *context) {
    const Node *node = opaque;
    const Operator *operator = node->operator;
    Registry *registry = operator->registry;
    int64_t asked[MOST_ASKED_WORDS], answer[MOST_ANSWERED_WORDS], words = 2 + node->words;
    void *cuda_context = NULL;
    Inputs inputs = {.first = NULL};
    uint64_t outputs[MOST_OUTPUTS];
    asked[0] = operator->number;
    memcpy(asked + 2, node->attributes, 8 * (size_t)node->words);
    TRY(describe_inputs(operator, context, asked, &words, &inputs));
    int code = driver.get_context(&cuda_context);
    if (code) return failed(operator, &inputs, "CUDA error %d at cuCtxGetCurrent: %s", code, explained(code));
    if (!cuda_context) return failed(operator, &inputs, "this thread has no CUDA context");
    asked[1] = (int64_t)(intptr_t)cuda_context;
    TRY(make_output(context, 0, inputs.axes, inputs.rank, outputs));
    for (size_t i = 0; i < inputs.rank; i++)
        if (!inputs.axes[i]) return make_empty(operator, context); /* an empty batch has nothing to compute, and no plan */

    uint64_t hash = hash_of(asked, words);
    if (!recall(registry, asked, words, hash, answer)) {
        char error[ERROR_BYTES] = "";
        int64_t answered = registry->planner(asked, words, answer, MOST_ANSWERED_WORDS, error, sizeof error);
        if (answered < 0 || answered > MOST_ANSWERED_WORDS) return failed(operator, &inputs, "%s", error);
        const char *flaw = flaw_of(answer, answered, inputs.count, operator->outputs);
        if (flaw) return failed(operator, &inputs, "the planner's answer cannot be used: %s", flaw);
        remember(registry, asked, words, hash, answer, answered);
    }
    const int64_t *at = answer + 1;
    for (int i = 1; i < operator->outputs; at += 1 + at[0], i++)
        TRY(make_output(context, i, at + 1, (size_t)at[0], outputs));
    return launch_with_scratch(operator, context, (size_t)answer[0], at, &inputs, outputs);
}

/* --- what ONNX Runtime asks about an operator --- */

static Status *read_attribute(const Operator *operator, const NodeInfo *info, int i, Node *node) {
    const char *name = operator->attribute_names[i];
    int64_t *words = node->attributes + node->words;
    /* Room for the other attributes, and for the inputs of a call. */
    size_t count = MOST_ASKED_WORDS / 2 - (size_t)node->words;
    float number = 0;
    switch (operator->attribute_types[i]) {
    case FIELD_INTS:
        TRY(ORT(KernelInfoGetAttributeArray_int64)(info, name, words + 1, &count));
        break;
    case FIELD_INT:
        count = 1;
        TRY(ORT(KernelInfoGetAttribute_int64)(info, name, words + 1));
        break;
    default:
        count = 1;
        TRY(ORT(KernelInfoGetAttribute_float)(info, name, &number));
        words[1] = 0;
        memcpy(words + 1, &number, sizeof number);
    }
    words[0] = (int64_t)count;
    node->words += 1 + (int64_t)count;
    return node->words < MOST_ASKED_WORDS / 2 ? NULL : failed(operator, NULL, "its attributes have too many values");
}

static Status *create(const CustomOperator *base, const Api *given, const NodeInfo *info, void **created) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const Operator *operator = (const Operator *)base;
    (void)given;
    pthread_once(&once, open_driver);
    if (driver.problem) return failed(operator, NULL, "%s", driver.problem);
    Node *node = calloc(1, sizeof *node);
    if (!node) return failed(operator, NULL, "there is no memory for a node");
    node->operator = operator;
    for (int i = 0; i < operator->attributes; i++) {
        Status *problem = read_attribute(operator, info, i, node);
        if (problem) {
            free(node);
            return problem;
        }
    }
    *created = node;
    return NULL;
}

/* The first output is like the first input; nothing is known of the others before a call. */
static Status *infer_shapes(const CustomOperator *base, ShapeContext *context) {
    TensorInfo *info; /* the context's own */
    (void)base;
    TRY(ORT(ShapeInferContext_GetInputTypeShape)(context, 0, &info));
    return ORT(ShapeInferContext_SetOutputTypeShape)(context, 0, info);
}

static const Operator *of(const CustomOperator *base) { return (const Operator *)base; }
static const char *name_of(const CustomOperator *base) { return of(base)->name; }
static const char *provider_of(const CustomOperator *base) { return of(base)->provider; }
static int input_type(const CustomOperator *base, size_t i) { return of(base)->input_types[i]; }
static size_t input_count(const CustomOperator *base) { return (size_t)of(base)->inputs; }
static int output_type(const CustomOperator *base, size_t i) { return of(base)->output_types[i]; }
static size_t output_count(const CustomOperator *base) { return (size_t)of(base)->outputs; }
static int kind_of_input(const CustomOperator *base, size_t i) {
    return (int)i < of(base)->required ? KIND_REQUIRED : KIND_OPTIONAL;
}
static int kind_of_output(const CustomOperator *base, size_t i) { return (void)base, (void)i, KIND_REQUIRED; }
static int memory_of_input(const CustomOperator *base, size_t i) { return (void)base, (void)i, MEMORY_OF_PROVIDER; }
static int none(const CustomOperator *base) { return (void)base, 0; }
static int first_version(const CustomOperator *base) { return (void)base, 1; }
static int last_version(const CustomOperator *base) { return (void)base, INT32_MAX; }

/* --- what Python calls --- */

/* Python asks it first. */
EXPORT int hd_interface(void) { return LAUNCHER_INTERFACE; }

/* A registry, which lives as long as the process: ONNX Runtime keeps addresses of its operators. NULL without memory. */
EXPORT Registry *hd_new_registry(Planner planner) {
    Registry *registry = calloc(1, sizeof *registry);
    if (registry && pthread_mutex_init(&registry->lock, NULL)) {
        free(registry);
        registry = NULL;
    }
    if (registry) registry->planner = planner;
    return registry;
}

/* Adds an operator; returns its number, -1 where it does not fit. A node may leave out the inputs behind the required
 * ones. */
EXPORT int hd_add_operator(Registry *registry, const char *name, const char *provider, int inputs, const int *input_types,
                           int required, int outputs, const int *output_types, int attributes,
                           const char *const *attribute_names, const int *attribute_types) {
    if (inputs < 1 || inputs > MOST_INPUTS || outputs < 1 || outputs > MOST_OUTPUTS) return -1;
    if (attributes < 0 || attributes > MOST_ATTRIBUTES) return -1;
    if (strlen(name) >= NAME_BYTES || strlen(provider) >= NAME_BYTES) return -1;
    for (int i = 0; i < attributes; i++)
        if (strlen(attribute_names[i]) >= NAME_BYTES) return -1;
    Operator *operator = calloc(1, sizeof *operator);
    if (!operator) return -1;
    operator->base = (CustomOperator){
        .version = INTERFACE_VERSION,
        .name = name_of,
        .provider = provider_of,
        .input_type = input_type,
        .input_count = input_count,
        .output_type = output_type,
        .output_count = output_count,
        .destroy = free,
        .input_kind = kind_of_input,
        .output_kind = kind_of_output,
        .input_memory = memory_of_input,
        .variadic_inputs_least = none,
        .variadic_inputs_alike = none,
        .variadic_outputs_least = none,
        .variadic_outputs_alike = none,
        .create = create,
        .compute = compute,
        .infer_shapes = infer_shapes,
        .first_version = first_version,
        .last_version = last_version,
    };
    operator->registry = registry, operator->number = registry->count, operator->inputs = inputs;
    operator->required = required, operator->outputs = outputs, operator->attributes = attributes;
    strcpy(operator->name, name);
    strcpy(operator->provider, provider);
    memcpy(operator->input_types, input_types, sizeof *input_types * (size_t)inputs);
    memcpy(operator->output_types, output_types, sizeof *output_types * (size_t)outputs);
    for (int i = 0; i < attributes; i++) {
        operator->attribute_types[i] = attribute_types[i];
        strcpy(operator->attribute_names[i], attribute_names[i]);
    }
    operator->next = registry->operators;
    registry->operators = operator;
    return registry->count++;
}

/* Says what this thread's next RegisterCustomOps registers. */
EXPORT void hd_register_next(Registry *registry) { registering = registry; }

/* Whether an answer of a planner could be used: what is wrong with it, or NULL. For tests. */
EXPORT const char *hd_flaw_of(const int64_t *answer, int64_t words, int inputs, int outputs) {
    return flaw_of(answer, words, inputs, outputs);
}

/* ONNX Runtime calls it when a session's options register the library. */
EXPORT Status *RegisterCustomOps(SessionOptions *options, const ApiBase *base) {
    const Api *found = base->get_api(INTERFACE_VERSION);
    Registry *registry = registering;
    registering = NULL;
    api = found ? found : base->get_api(1); /* an older one can still make an error */
    if (!found) return ORT(CreateStatus)(STATUS_FAILED, "hdexport's operators need ONNX Runtime 1.18 or newer");
    if (!registry) return ORT(CreateStatus)(STATUS_FAILED, "hdplugins.onnxruntime.operators registers this library");
    if (!registry->domain) {
        Domain *domain;
        TRY(ORT(CreateCustomOpDomain)("hdexport", &domain));
        for (Operator *operator = registry->operators; operator; operator = operator->next)
            TRY(ORT(CustomOpDomain_Add)(domain, operator));
        registry->domain = domain;
    }
    return ORT(AddCustomOpDomain)(options, registry->domain);
}
