/* Training updates for matrix-variate machines on the CPU, gradient descent steps, and uniform random numbers.
 *
 * The visible layers are matrices X with couplings U X V', optionally combined with layers that have dense couplings.
 * native_job.py defines the array layout, and native.py documents when this code is used. The code is plain C with the
 * vector types that GCC and Clang provide for every processor. On x86, the kernels are compiled for three instruction
 * sets, and the best supported one is selected at run time.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Version of the interface to Python. Increment it together with _NATIVE_INTERFACE in __init__.py. */
#define INTERFACE 9
#define INLINE static inline __attribute__((always_inline))
/* Rows are padded to a multiple of this many floats, which is one cache line and a multiple of every vector width. */
#define PAD 16
#define PADDED(n) (((n) + PAD - 1) / PAD * PAD)
/* Number of Philox rounds. */
#define ROUNDS 10
/* Index of the first element in a part when n elements are divided into equal parts. */
#define PART(n, number, parts) ((int)((long)(n) * (number) / (parts)))

enum { BERNOULLI, GAUSSIAN, CATEGORICAL };

/* A visible layer of shape (I, J), coupled to a hidden layer of shape (K, L). Layer in native_job.py has the same fields
 * in the same order. A layer with a dense coupling has a single row (I = 1) and no U, and V contains its weights, of
 * shape (K, L, J). Jp and Lp are the padded numbers of columns. Fields ending in _at are offsets into a buffer, in
 * floats. */
typedef struct {
    int32_t I, J, rank, kind;
    int32_t categories;          /* number of categories (a row has J / categories sites), or 1 for other units */
    int32_t lines, columns;      /* layout of the random numbers used to draw a sample; see random/philox.py */
    const float *U;              /* (rank, K, I), or NULL */
    const float *V;              /* (rank, L, J) */
    const float *B;              /* (I, J) */
    float *data;                 /* (n_data, I, J) */
    const uint8_t *known;        /* (n_data, I, J), nonzero for known entries; NULL if all entries are known */
    const float *scale, *shift;  /* (I, J) each; states are data * scale - shift; NULL if states equal the data */
    int64_t states_at;           /* states, (I, Jp), in the states of a sample */
    int64_t products_at;         /* products U X, (rank, K, Jp), in the products of a sample */
    int64_t v_at;                /* V, (rank, L, Jp), in `packed`; unused for dense layers */
    int64_t vt_at;               /* V transposed, (rank, J, Lp), or (J, K, Lp) for dense layers, in `packed` */
    int64_t b_at;                /* B, (I, Jp), in `packed` */
    int64_t to_u_at;             /* gradient of U, (rank, K, I), in the gradient of a chunk */
    int64_t to_v_at;             /* gradient of V, (rank, L, Jp), or (J, K, Lp) for dense layers */
    int64_t to_b_at;             /* gradient of B, (I, Jp) */
    int64_t to_s_at;             /* sums for the gradient of the variances, (I, Jp); used only if they are learned */
    float *to_U, *to_V, *to_B;   /* output: gradients with the shapes of U, V and B */
    float *to_S;                 /* output: (I, J), sum of w t (f - t), see flat_variances.py; NULL for fixed variances */
} Layer;

/* Arguments for computing the gradient in an update or, if `filling` is set, for drawing the missing entries in the data.
 * Job in native_job.py has the same fields in the same order. Samples are divided into chunks, each with a separate
 * gradient. A chunk stores the states of a group of samples and accumulates their gradients for U together. */
typedef struct {
    int32_t filling, K, L;
    int32_t gaussian;            /* whether the hidden layer is Gaussian */
    int32_t n_layers, n_data, n_chains, steps, chunks, group, threads;
    int32_t lines, columns;      /* layout of the random numbers used to draw the hidden layer */
    uint32_t first_row, update, first_draw; /* counters for the first sample in the first draw */
    uint64_t key;
    float data_weight, chain_weight;
    const Layer *layers;
    const float *C;              /* (K, L) */
    float *chains;               /* persistent chains, (n_chains, states), or NULL if chains start from the data */
    /* Normal random numbers for each draw of a Gaussian layer, or NULL for draws of other layers, for which the C code
     * computes uniform random numbers. Each step draws the hidden layer and then the visible layers. When drawing missing
     * entries, an additional first step draws only the visible layers. */
    const float *const *normal;
    float *packed;               /* parameters in padded rows; the caller initializes it with zeros */
    float *gradients;            /* (chunks, gradient_size) */
    float *scratch;              /* (threads, scratch_size) */
    float *to_C;                 /* (K, L) */
    float *data_mean;            /* (K, L): data_weight times the sum of the hidden means of the data */
    int64_t states, products;    /* number of floats per sample */
    int64_t c_at;                /* C, (K, Lp), in `packed` */
    int64_t to_c_at, to_mean_at; /* gradients of C from the chains and from the data, (K, Lp) each */
    int64_t gradient_size, scratch_size;
} Job;

/* Scratch memory for one thread. */
typedef struct {
    float *states, *kept;                                  /* for a group of samples */
    float *products, *field, *hidden, *half, *spare;       /* for one sample */
} Scratch;

/* A range of consecutive parameters that share a learning rate and a weight decay. */
typedef struct {
    int64_t end;
    float rate, decay;
} Segment;

/* A gradient descent step; see updates/step.py. */
typedef struct {
    float *params, *momenta, *gradient;
    const Segment *segments;
    int64_t count;
    float momentum;
    int parts;
    atomic_int *broken;          /* set to 1 if the gradient is not finite, and to 2 if the new parameters are not */
} Step;

INLINE void clear(float *into, int64_t count) { memset(into, 0, sizeof(float) * count); }

/* Return whether a number is infinite or NaN. The test uses integers, because compilers do not vectorize float sums. */
INLINE uint32_t is_broken(const float *x)
{
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return (bits & 0x7f800000) == 0x7f800000;
}

typedef float Four __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

/* Transpose a 4 x 4 matrix, given by its rows, into `out`. */
INLINE void transpose(const float *a, const float *b, const float *c, const float *d, float *out)
{
    Four rows[4], columns[4];
    memcpy(rows, a, sizeof(Four));
    memcpy(rows + 1, b, sizeof(Four));
    memcpy(rows + 2, c, sizeof(Four));
    memcpy(rows + 3, d, sizeof(Four));
    const Four ab0 = SHUFFLE(rows[0], rows[1], 0, 4, 1, 5), ab1 = SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
    const Four cd0 = SHUFFLE(rows[2], rows[3], 0, 4, 1, 5), cd1 = SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
    columns[0] = SHUFFLE(ab0, cd0, 0, 1, 4, 5);
    columns[1] = SHUFFLE(ab0, cd0, 2, 3, 6, 7);
    columns[2] = SHUFFLE(ab1, cd1, 0, 1, 4, 5);
    columns[3] = SHUFFLE(ab1, cd1, 2, 3, 6, 7);
    memcpy(out, columns, sizeof columns);
}

/* An array of uniform random numbers, of shape (rows, lines, columns); see random/philox.py. */
typedef struct {
    float *out;
    int64_t lines, columns;
    uint64_t key;
    uint32_t first_row, step, draw;
} Uniform;

/* -- kernels, compiled once per instruction set -------------------------------------------------------------- */

#if defined(__x86_64__) && defined(__clang__)
#define FOR_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512vl,avx512dq,fma\"))), apply_to = function)")
#define FOR_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2,fma\"))), apply_to = function)")
#define FOR_END _Pragma("clang attribute pop")
#elif defined(__x86_64__)
#define FOR_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512vl,avx512dq,fma\")")
#define FOR_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma\")")
#define FOR_END _Pragma("GCC pop_options")
#endif

#define NAME(x) x##_any
#define LANES 4
#define ROWS 5
#define GK 2
#define GI 4
#define EVEN(a, b) (((Pairs)(a) & 0xffffffffu) * ((Pairs)(b) & 0xffffffffu))
#include "_random_kernel.h"
#include "_native_kernel.h"

#ifdef FOR_END
FOR_AVX2
#define NAME(x) x##_avx2
#define LANES 8
#define ROWS 6
#define GK 3
#define GI 4
#define EVEN(a, b) ((Pairs)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#include "_random_kernel.h"
#include "_native_kernel.h"
FOR_END
FOR_AVX512
#define NAME(x) x##_avx512
#define LANES 16
#define ROWS 8
#define GK 5
#define GI 4
#define EVEN(a, b) ((Pairs)_mm512_mul_epu32((__m512i)(a), (__m512i)(b)))
#include "_random_kernel.h"
#include "_native_kernel.h"
FOR_END
#endif

/* Function that computes one part of the work. */
typedef void (*Part)(const void *work, int part);

/* Kernels for one instruction set. */
typedef struct {
    const char *name;
    void (*chunk)(const Job *, const Scratch *, int);
    Part check, step;
    void (*uniform)(const Uniform *, int64_t first, int64_t last);
    int supported; /* whether this machine supports the instruction set */
} Processor;
#define PROCESSOR(x, supported) {#x, chunk_##x, check_##x, step_##x, uniform_##x, supported}
/* Instruction sets, ordered from slowest to fastest. */
static Processor processors[] = {
    PROCESSOR(any, 1),
#ifdef FOR_END
    PROCESSOR(avx2, 0),
    PROCESSOR(avx512, 0),
#endif
};
#define PROCESSORS ((int)(sizeof processors / sizeof *processors))
static const Processor *processor = processors;

/* Select the best instruction set that this machine supports. */
static void choose_processor(void)
{
#ifdef FOR_END
    __builtin_cpu_init();
    processors[1].supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    processors[2].supported = processors[1].supported && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    for (int i = 0; i < PROCESSORS; i++)
        if (processors[i].supported) processor = processors + i;
}

/* -- threads ----------------------------------------------------------------------------------------------------
 *
 * Threads fetch chunks on demand, so that no chunk waits for a thread that has not woken up yet. On a machine shared with
 * other programs, this is faster than OpenMP's static scheduling. */

static struct {
    pthread_mutex_t lock;
    pthread_mutex_t owner; /* held by the caller whose job is running; meanwhile, other callers use a single thread */
    pthread_cond_t begin, end;
    const Job *job;        /* current job, or NULL if idle */
    atomic_int next;       /* index of the next chunk */
    int workers, active;
    unsigned generation;
    pid_t process;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .owner = PTHREAD_MUTEX_INITIALIZER,
          .begin = PTHREAD_COND_INITIALIZER, .end = PTHREAD_COND_INITIALIZER};

/* Process chunks until none remain, using the scratch memory of thread `place`. */
static void work(const Job *job, atomic_int *next, int place)
{
    const int area = PADDED(job->L) * job->K;
    Scratch own;
    own.states = job->scratch + place * job->scratch_size;
    own.kept = own.states + job->group * job->states;
    own.products = own.kept + job->group * job->products;
    own.field = own.products + job->products;
    own.hidden = own.field + area;
    own.half = own.hidden + area;
    own.spare = own.half + job->products;
    for (int number; (number = atomic_fetch_add(next, 1)) < job->chunks;) processor->chunk(job, &own, number);
}

/* Main loop of a thread in the pool. */
static void *worker(void *number)
{
    const int place = (int)(intptr_t)number;
    unsigned seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.job || seen == pool.generation || place >= pool.job->threads)
            pthread_cond_wait(&pool.begin, &pool.lock);
        const Job *job = pool.job;
        seen = pool.generation;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        work(job, &pool.next, place);
        pthread_mutex_lock(&pool.lock);
        if (--pool.active == 0) pthread_cond_signal(&pool.end);
    }
    return NULL;
}

/* Start threads until the pool has `wanted` threads. A forked process does not inherit its parent's threads. */
static void grow_pool(int wanted)
{
    if (pool.process != getpid()) {
        pool.process = getpid();
        pool.workers = pool.active = 0;
        pool.job = NULL;
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.begin, NULL);
        pthread_cond_init(&pool.end, NULL);
    }
    sigset_t all, former; /* block all signals in the new threads, because Python's threads handle them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    for (; pool.workers < wanted; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.workers + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &former, NULL);
}

/* Process all chunks of a job in this thread and in threads from the pool. */
static void share(const Job *job)
{
    if (job->threads < 2 || job->chunks < 2 || pthread_mutex_trylock(&pool.owner)) {
        atomic_int next = 0;
        work(job, &next, 0);
        return;
    }
    grow_pool(job->threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.job = job;
    pool.generation++;
    atomic_store(&pool.next, 0);
    pthread_cond_broadcast(&pool.begin);
    pthread_mutex_unlock(&pool.lock);
    work(job, &pool.next, 0);
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL; /* threads that wake up after this point go back to sleep */
    while (pool.active) pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

/* ID of the process that owns the OpenMP threads. */
static pid_t first_process;

/* Compute all parts with OpenMP threads, which PyTorch uses as well. After a matrix product, these threads poll for work
 * for a while and start immediately, whereas other threads would have to wait for a core. A forked process computes all
 * parts in one thread, because it would wait forever for its parent's threads. */
static void in_parts(Part compute, const void *work, int parts)
{
    const int with_threads = parts > 1 && getpid() == first_process;
#pragma omp parallel for num_threads(parts) if (with_threads)
    for (int part = 0; part < parts; part++) compute(work, part);
}

/* -- updates ------------------------------------------------------------------------------------------------ */

/* Copy rows to padded rows. The padding keeps its initial zeros. */
static void pad_rows(float *into, const float *from, int64_t rows, int columns)
{
    for (int64_t r = 0; r < rows; r++)
        memcpy(into + r * PADDED(columns), from + r * columns, sizeof(float) * columns);
}

/* Copy all parameters to padded rows. */
static void pack(const Job *job)
{
    const int L = job->L, Lp = PADDED(L);
    pad_rows(job->packed + job->c_at, job->C, job->K, L);
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int J = layer->J;
        pad_rows(job->packed + layer->b_at, layer->B, layer->I, J);
        float *vt = job->packed + layer->vt_at;
        if (!layer->U) {
            for (int k = 0; k < job->K; k++)
                for (int l = 0; l < L; l++)
                    for (int j = 0; j < J; j++) vt[((int64_t)j * job->K + k) * Lp + l] = layer->V[((int64_t)k * L + l) * J + j];
            continue;
        }
        pad_rows(job->packed + layer->v_at, layer->V, (int64_t)layer->rank * L, J);
        for (int r = 0; r < layer->rank; r++)
            for (int l = 0; l < L; l++)
                for (int j = 0; j < J; j++) vt[((int64_t)r * J + j) * Lp + l] = layer->V[((int64_t)r * L + l) * J + j];
    }
}

/* Add rows of a given width, including any padding, to a result without padding. */
static void add_rows(float *into, const float *from, int64_t rows, int columns, int width)
{
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) into[r * columns + c] += from[r * width + c];
}

/* Sum the gradients of all chunks in a fixed order, so that the result does not depend on the number of threads. */
static void add_chunks(const Job *job)
{
    const int K = job->K, L = job->L;
    clear(job->to_C, K * L);
    clear(job->data_mean, K * L);
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        if (layer->U) clear(layer->to_U, (int64_t)layer->rank * K * layer->I);
        clear(layer->to_V, (int64_t)(layer->U ? layer->rank : K) * L * layer->J);
        clear(layer->to_B, layer->I * layer->J);
        if (layer->to_S) clear(layer->to_S, layer->I * layer->J);
    }
    for (int number = 0; number < job->chunks; number++) {
        const float *gradient = job->gradients + number * job->gradient_size;
        add_rows(job->to_C, gradient + job->to_c_at, K, L, PADDED(L));
        add_rows(job->data_mean, gradient + job->to_mean_at, K, L, PADDED(L));
        for (int m = 0; m < job->n_layers; m++) {
            const Layer *layer = job->layers + m;
            const int I = layer->I, J = layer->J, Jp = PADDED(J), Lp = PADDED(L);
            const float *to_v = gradient + layer->to_v_at;
            if (layer->U) {
                add_rows(layer->to_U, gradient + layer->to_u_at, (int64_t)layer->rank * K, I, I);
                add_rows(layer->to_V, to_v, (int64_t)layer->rank * L, J, Jp);
            } else
                for (int k = 0; k < K; k++)
                    for (int l = 0; l < L; l++)
                        for (int j = 0; j < J; j++)
                            layer->to_V[((int64_t)k * L + l) * J + j] += to_v[((int64_t)j * K + k) * Lp + l];
            add_rows(layer->to_B, gradient + layer->to_b_at, I, J, Jp);
            if (layer->to_S) add_rows(layer->to_S, gradient + layer->to_s_at, I, J, Jp);
        }
    }
    /* At this point, data_mean contains the data term of the gradient of C: minus the weighted sum of hidden means. */
    for (int at = 0; at < K * L; at++) {
        job->to_C[at] += job->data_mean[at];
        job->data_mean[at] *= -1;
    }
}

/* Compute the gradient for an update, or draw missing entries. */
static void contrast(const Job *job)
{
    pack(job);
    share(job);
    if (!job->filling) add_chunks(job);
}

/* -- Python functions, which take array addresses as arguments --------------------------------------------------------- */

#define FLOATS(address) ((float *)(uintptr_t)(address))

static PyObject *py_contrast(PyObject *module, PyObject *address)
{
    const Job *job = PyLong_AsVoidPtr(address);
    if (job == NULL) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no job");
    Py_BEGIN_ALLOW_THREADS
    contrast(job);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Number of parameters below which one thread is faster than several. */
#define WORTH_THREADS 32768

static PyObject *py_step(PyObject *module, PyObject *args)
{
    unsigned long long params, momenta, gradient;
    int threads;
    atomic_int broken = 0;
    PyObject *given;
    Step step = {.broken = &broken};
    if (!PyArg_ParseTuple(args, "KKKO!fi", &params, &momenta, &gradient, &PyTuple_Type, &given, &step.momentum, &threads))
        return NULL;
    const Py_ssize_t n_segments = PyTuple_Size(given);
    Segment *segments = PyMem_Malloc(sizeof(Segment) * (n_segments + 1));
    if (segments == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n_segments; i++) {
        long long count;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, i), "Lff", &count, &segments[i].rate, &segments[i].decay)) {
            PyMem_Free(segments);
            return NULL;
        }
        step.count += count;
        segments[i].end = step.count;
    }
    step.params = FLOATS(params);
    step.momenta = FLOATS(momenta);
    step.gradient = FLOATS(gradient);
    step.segments = segments;
    step.parts = step.count < WORTH_THREADS ? 1 : threads;
    Py_BEGIN_ALLOW_THREADS
    in_parts(processor->check, &step, step.parts);
    if (!broken) in_parts(processor->step, &step, step.parts);
    Py_END_ALLOW_THREADS
    PyMem_Free(segments);
    return PyLong_FromLong(broken);
}

static PyObject *py_uniform(PyObject *module, PyObject *args)
{
    unsigned long long out, key;
    Py_ssize_t rows, lines, columns;
    unsigned int first_row, step, draw;
    if (!PyArg_ParseTuple(args, "KnnnKIII", &out, &rows, &lines, &columns, &key, &first_row, &step, &draw)) return NULL;
    const Uniform uniform = {FLOATS(out), lines, columns, key, first_row, step, draw};
    Py_BEGIN_ALLOW_THREADS
    processor->uniform(&uniform, 0, rows);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_processors(PyObject *module, PyObject *unused)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < PROCESSORS; i++) {
        PyObject *name = processors[i].supported ? PyUnicode_FromString(processors[i].name) : NULL;
        if (processors[i].supported && (name == NULL || PyList_Append(names, name))) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_use(PyObject *module, PyObject *name)
{
    for (int i = 0; PyUnicode_Check(name) && i < PROCESSORS; i++)
        if (processors[i].supported && PyUnicode_CompareWithASCIIString(name, processors[i].name) == 0) {
            processor = processors + i;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "no such processor: %R", name);
}

static PyObject *py_workers(PyObject *module, PyObject *unused)
{
    return PyLong_FromLong(pool.process == getpid() ? pool.workers : 0);
}

/* Name and offset of a field. native_job.py checks that its structures have the same fields. */
typedef struct {
    const char *name;
    size_t offset;
} Field;

#define FIELD(type, name) {#name, offsetof(type, name)}
#define COUNT(array) ((Py_ssize_t)(sizeof(array) / sizeof(array[0])))

static const Field layer_fields[] = {
    FIELD(Layer, I), FIELD(Layer, J), FIELD(Layer, rank), FIELD(Layer, kind), FIELD(Layer, categories),
    FIELD(Layer, lines), FIELD(Layer, columns), FIELD(Layer, U), FIELD(Layer, V), FIELD(Layer, B), FIELD(Layer, data),
    FIELD(Layer, known), FIELD(Layer, scale), FIELD(Layer, shift), FIELD(Layer, states_at), FIELD(Layer, products_at),
    FIELD(Layer, v_at), FIELD(Layer, vt_at), FIELD(Layer, b_at), FIELD(Layer, to_u_at), FIELD(Layer, to_v_at),
    FIELD(Layer, to_b_at), FIELD(Layer, to_s_at), FIELD(Layer, to_U), FIELD(Layer, to_V), FIELD(Layer, to_B),
    FIELD(Layer, to_S),
};

static const Field job_fields[] = {
    FIELD(Job, filling), FIELD(Job, K), FIELD(Job, L), FIELD(Job, gaussian), FIELD(Job, n_layers), FIELD(Job, n_data),
    FIELD(Job, n_chains), FIELD(Job, steps), FIELD(Job, chunks), FIELD(Job, group), FIELD(Job, threads),
    FIELD(Job, lines), FIELD(Job, columns), FIELD(Job, first_row), FIELD(Job, update), FIELD(Job, first_draw),
    FIELD(Job, key), FIELD(Job, data_weight), FIELD(Job, chain_weight), FIELD(Job, layers), FIELD(Job, C),
    FIELD(Job, chains), FIELD(Job, normal), FIELD(Job, packed), FIELD(Job, gradients), FIELD(Job, scratch),
    FIELD(Job, to_C), FIELD(Job, data_mean), FIELD(Job, states), FIELD(Job, products), FIELD(Job, c_at),
    FIELD(Job, to_c_at), FIELD(Job, to_mean_at), FIELD(Job, gradient_size), FIELD(Job, scratch_size),
};

/* Add a tuple of (name, offset) pairs to a module. Return -1 with an exception set on failure. */
static int add_fields(PyObject *module, const char *name, const Field *fields, Py_ssize_t count)
{
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        PyObject *field = Py_BuildValue("(sn)", fields[i].name, (Py_ssize_t)fields[i].offset);
        if (field == NULL || PyTuple_SetItem(found, i, field)) Py_CLEAR(found);
    }
    if (found == NULL) return -1;
    const int failed = PyModule_AddObject(module, name, found);
    if (failed) Py_DECREF(found);
    return failed;
}

static PyMethodDef methods[] = {
    {"workers", py_workers, METH_NOARGS, "Return the number of threads in this process's pool."},
    {"processors", py_processors, METH_NOARGS,
     "Return the instruction sets that this code was compiled for and that this machine supports, from slowest to "
     "fastest."},
    {"use", py_use, METH_O, "Use the code for a given instruction set instead of the best one. For tests."},
    {"contrast", py_contrast, METH_O,
     "Compute the gradient for an update, or draw missing entries. The argument is the address of a Job."},
    {"step", py_step, METH_VARARGS,
     "Perform a gradient descent step. The arguments are the addresses of the parameters, the momenta and the gradient, a "
     "tuple of segments, the momentum, and the number of threads. Each segment is a tuple of the number of consecutive "
     "parameters, their learning rate and their weight decay. The gradient is overwritten with the previous parameters. "
     "Return 0 on success, 1 if the gradient is not finite (nothing is changed), or 2 if the new parameters are not "
     "finite."},
    {"uniform", py_uniform, METH_VARARGS,
     "Fill an array with uniform random numbers. The arguments are the address of the array, the number of rows, lines "
     "and columns, the key, the first row, the step, and the draw."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    choose_processor();
    first_process = getpid();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) ||
        PyModule_AddIntConstant(module, "PAD", PAD) ||
        PyModule_AddIntConstant(module, "job_size", sizeof(Job)) ||
        PyModule_AddIntConstant(module, "layer_size", sizeof(Layer)) ||
        add_fields(module, "job_fields", job_fields, COUNT(job_fields)) ||
        add_fields(module, "layer_fields", layer_fields, COUNT(layer_fields))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
