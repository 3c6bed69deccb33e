/* Contrastive divergence of matrices, and of further layers with full weights, on the processor, and uniform random numbers: see native.py, which lays out the arrays.
 *
 * Plain C with vector types, which GCC and Clang have for every processor. On x86 the same code is compiled for three
 * kinds of processor, and the best one that is there is taken.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INTERFACE 7 /* grows with every change of what native.py has to know */
#define INLINE static inline __attribute__((always_inline))
#define PAD 16 /* floats: a cache line, and a whole number of vectors of every kind */
#define PADDED(n) (((n) + PAD - 1) / PAD * PAD)
#define ROUNDS 10 /* of Philox */
#define PART(n, number, parts) ((int)((long)(n) * (number) / (parts)))

enum { BERNOULLI, GAUSSIAN, CATEGORICAL };

/* Where things of a layer begin; lengths in floats. native.py has the same fields in the same order.
 * A layer with full weights is one row, I = 1, and V are its weights: (K, L, J), without U. */
typedef struct {
    int32_t I, J, rank, kind;
    int32_t categories;          /* of a categorical layer: a row has J / categories sites. 1 otherwise */
    int32_t lines, columns;      /* of the random numbers that draw a sample: see random/philox.py */
    const float *U;              /* (rank, K, I), or NULL */
    const float *V;              /* (rank, L, J) */
    const float *B;              /* (I, J) */
    float *data;                 /* (n_data, I, J) */
    const uint8_t *known;        /* like data: which entries are not to be drawn; NULL for all of them */
    const float *scale, *shift;  /* (I, J) each, or neither: data * scale - shift are states, and so are draws - shift */
    int64_t states_at;           /* in a sample's states: (I, Jp) */
    int64_t products_at;         /* in a sample's products: (rank, K, Jp) */
    int64_t v_at, vt_at, b_at;   /* in `packed`: (rank, L, Jp), (rank, J, Lp), (I, Jp); of full weights vt (J, K, Lp) */
    int64_t to_u_at, to_v_at, to_b_at; /* in a gradient: (rank, K, I), (rank, L, Jp) or like vt, (I, Jp) */
    int64_t to_s_at;             /* (I, Jp), where variances are learned */
    float *to_U, *to_V, *to_B;   /* the result, like U, V and B */
    float *to_S;                 /* (I, J): the sum of w t (f - t), see FlatBackend; NULL where no variance is learned */
} Layer;

/* The gradient of an update; or, where `filling`, draws of the unknown entries of the data. */
typedef struct {
    int32_t filling, K, L, gaussian, n_layers, n_data, n_chains, steps, chunks, group, threads;
    int32_t lines, columns;      /* of the random numbers that draw a hidden layer */
    uint32_t first_row, update, first_draw; /* of the random numbers: those of the first sample and of the first draw */
    uint64_t key;
    float data_weight, chain_weight;
    const Layer *layers;
    const float *C;              /* (K, L) */
    float *chains;               /* persistent ones, (n_chains, states), or NULL */
    /* Normal numbers of Gaussian layers, for each step of the hidden layer, (n_chains, K, L), then of each visible one; NULL for
     * other layers, whose uniform numbers are computed here. When filling, there is another step before all others, in which
     * only the visible layers are drawn. */
    const float *const *normal;
    float *packed;               /* parameters in padded rows; given as zeros at first */
    float *gradients;            /* (chunks, gradient_size) */
    float *scratch;              /* (threads, scratch_size) */
    float *to_C;                 /* (K, L) */
    float *data_mean;            /* (K, L): data_weight times the sum of the hidden means of the data */
    int64_t states, products, c_at, to_c_at, to_mean_at, gradient_size, scratch_size;
} Job;

typedef struct {
    float *states, *kept;                                  /* of a group of samples */
    float *products, *field, *hidden, *half, *spare;       /* of one sample */
} Scratch;

/* Means of binary units, scale * sigmoid(field + bias), or, with numbers, draws. Arrays are (rows, columns), bias (columns,);
 * `into` may be `field`. */
typedef struct {
    const float *field, *bias, *numbers;
    float *into;
    float scale;
    int rows, columns, parts;
} Binary;

/* Sums of rows (rows[0] + rows[1], columns) with two weights; `minus_first`, if given, is minus the part of the first rows. */
typedef struct {
    const float *x;
    float *total, *minus_first;
    float weights[2];
    int rows[2], columns, parts;
} Sums;

typedef struct {
    int64_t end;                 /* of the parameters with this rate and weight decay */
    float rate, decay;
} Run;

typedef struct {
    float *params, *momenta, *gradient;
    const Run *runs;
    int64_t count;
    float momentum;
    int parts;
    atomic_int *broken;          /* 1: the gradient is not finite, 2: the parameters are not */
} Step;

INLINE void clear(float *into, int64_t count) { memset(into, 0, sizeof(float) * count); }

INLINE uint32_t is_broken(const float *x) /* by integers, because a sum of floats is not computed by vectors */
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

/* Write the transpose of four rows of four numbers. */
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

/* Uniform numbers of an array (rows, lines, columns). */
typedef struct {
    float *out;
    int64_t lines, columns;
    uint64_t key;
    uint32_t first_row, step, draw;
} Uniform;

/* -- the kernels, for each kind of processor ------------------------------------------------------------------ */

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

typedef void (*Part)(const void *job, int part);
typedef struct {
    const char *name;
    void (*chunk)(const Job *, const Scratch *, int);
    Part binary, sums, check, step;
    void (*uniform)(const Uniform *, int64_t first, int64_t last);
    int there;
} Processor;
#define PROCESSOR(x, there) {#x, chunk_##x, binary_##x, sums_##x, check_##x, step_##x, uniform_##x, there}
static Processor processors[] = { /* the best last */
    PROCESSOR(any, 1),
#ifdef FOR_END
    PROCESSOR(avx2, 0),
    PROCESSOR(avx512, 0),
#endif
};
#define PROCESSORS ((int)(sizeof processors / sizeof *processors))
static const Processor *processor = processors;

static void look_at_processor(void)
{
#ifdef FOR_END
    __builtin_cpu_init();
    processors[1].there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    processors[2].there = processors[1].there && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    for (int i = 0; i < PROCESSORS; i++)
        if (processors[i].there) processor = processors + i;
}

/* -- threads: idle threads take chunks, so that none waits for a thread that has not woken up yet -- */

static struct {
    pthread_mutex_t lock;
    pthread_mutex_t owner; /* who gives the present job; another one meanwhile does all of its own alone */
    pthread_cond_t begin, end;
    void (*work)(const void *job, atomic_int *next, int place);
    const void *job; /* NULL while there is none */
    int threads;
    atomic_int next;
    int workers, active;
    unsigned generation;
    pid_t process;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .owner = PTHREAD_MUTEX_INITIALIZER,
          .begin = PTHREAD_COND_INITIALIZER, .end = PTHREAD_COND_INITIALIZER};

static void work(const void *given, atomic_int *next, int place)
{
    const Job *job = given;
    const int K = job->K, area = PADDED(job->L) * K;
    float *at = job->scratch + place * job->scratch_size;
    Scratch own;
    own.states = at, at += job->group * job->states;
    own.kept = at, at += job->group * job->products;
    own.products = at, at += job->products;
    own.field = at, at += area;
    own.hidden = at, at += area;
    own.half = at, at += job->products;
    own.spare = at;
    for (int number; (number = atomic_fetch_add(next, 1)) < job->chunks;) processor->chunk(job, &own, number);
}

static void *worker(void *number)
{
    const int place = (int)(intptr_t)number;
    unsigned seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.job || seen == pool.generation || place >= pool.threads) pthread_cond_wait(&pool.begin, &pool.lock);
        const void *job = pool.job;
        seen = pool.generation;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        pool.work(job, &pool.next, place);
        pthread_mutex_lock(&pool.lock);
        if (--pool.active == 0) pthread_cond_signal(&pool.end);
    }
    return NULL;
}

/* Start the wanted threads in addition to the caller; a forked process has none of the threads of its parent. */
static void hire(int wanted)
{
    if (pool.process != getpid()) {
        pool.process = getpid();
        pool.workers = pool.active = 0;
        pool.job = NULL;
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.begin, NULL);
        pthread_cond_init(&pool.end, NULL);
    }
    sigset_t all, former; /* signals are for the thread that Python waits for them in */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    for (; pool.workers < wanted; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.workers + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &former, NULL);
}

static void share(void (*work)(const void *, atomic_int *, int), const void *job, int threads)
{
    if (threads < 2 || pthread_mutex_trylock(&pool.owner)) {
        atomic_int next = 0;
        work(job, &next, 0);
        return;
    }
    hire(threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.work = work, pool.job = job, pool.threads = threads;
    pool.generation++;
    atomic_store(&pool.next, 0);
    pthread_cond_broadcast(&pool.begin);
    pthread_mutex_unlock(&pool.lock);
    work(job, &pool.next, 0);
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL; /* who wakes up now goes back to sleep */
    while (pool.active) pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

/* Parts of a job by the threads of OpenMP, which are PyTorch's own. After a product they poll for work for a while: they begin
 * at once, while other threads would wait for their processors. */
static void in_parts(Part work, const void *job, int parts)
{
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int part = 0; part < parts; part++) work(job, part);
}

/* -- an update ------------------------------------------------------------------------------------------------ */

/* Padding is zero from the beginning, and stays so. */
static void pad_rows(float *into, const float *from, int64_t rows, int columns)
{
    for (int64_t r = 0; r < rows; r++)
        memcpy(into + r * PADDED(columns), from + r * columns, sizeof(float) * columns);
}

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

/* Add what stands in padded rows, or in rows without padding, to a result. */
static void add_rows(float *into, const float *from, int64_t rows, int columns, int width)
{
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) into[r * columns + c] += from[r * width + c];
}

/* Sum the chunks' gradients, always in the same order, so that the result does not depend on the threads. */
static void add_up(const Job *job)
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
    for (int at = 0; at < K * L; at++) {
        job->to_C[at] += job->data_mean[at];
        job->data_mean[at] *= -1;
    }
}

static void contrast(const Job *job)
{
    pack(job);
    share(work, job, job->chunks > 1 ? job->threads : 1);
    if (!job->filling) add_up(job);
}

/* -- Python: arrays are given by their addresses -------------------------------------------------------------- */

static PyObject *py_contrast(PyObject *module, PyObject *address)
{
    const Job *job = PyLong_AsVoidPtr(address);
    if (job == NULL) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no job");
    Py_BEGIN_ALLOW_THREADS
    contrast(job);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static int worth_threads(int64_t entries, int threads) { return entries < 32768 ? 1 : threads; }

static PyObject *py_step(PyObject *module, PyObject *args)
{
    unsigned long long params, momenta, gradient;
    int threads;
    atomic_int broken = 0;
    PyObject *given;
    Step step = {.broken = &broken};
    if (!PyArg_ParseTuple(args, "KKKO!fi", &params, &momenta, &gradient, &PyTuple_Type, &given, &step.momentum, &threads))
        return NULL;
    const Py_ssize_t n_runs = PyTuple_Size(given);
    Run *runs = PyMem_Malloc(sizeof(Run) * (n_runs + 1));
    if (runs == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n_runs; i++) {
        long long count;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, i), "Lff", &count, &runs[i].rate, &runs[i].decay)) {
            PyMem_Free(runs);
            return NULL;
        }
        runs[i].end = step.count += count;
    }
    step.params = (float *)(uintptr_t)params, step.momenta = (float *)(uintptr_t)momenta;
    step.gradient = (float *)(uintptr_t)gradient, step.runs = runs;
    step.parts = worth_threads(step.count, threads);
    Py_BEGIN_ALLOW_THREADS
    in_parts(processor->check, &step, step.parts);
    if (!broken) in_parts(processor->step, &step, step.parts);
    Py_END_ALLOW_THREADS
    PyMem_Free(runs);
    return PyLong_FromLong(broken);
}

static PyObject *py_binary(PyObject *module, PyObject *args)
{
    unsigned long long field, bias, numbers, into;
    int threads;
    Binary job;
    if (!PyArg_ParseTuple(args, "KKKKiifi", &field, &bias, &numbers, &into, &job.rows, &job.columns, &job.scale, &threads))
        return NULL;
    job.field = (const float *)(uintptr_t)field, job.bias = (const float *)(uintptr_t)bias;
    job.numbers = (const float *)(uintptr_t)numbers, job.into = (float *)(uintptr_t)into;
    job.parts = worth_threads((int64_t)job.rows * job.columns, threads);
    Py_BEGIN_ALLOW_THREADS
    in_parts(processor->binary, &job, job.parts);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_sums(PyObject *module, PyObject *args)
{
    unsigned long long x, total, minus_first;
    int threads;
    Sums job;
    if (!PyArg_ParseTuple(args, "KKKiiiffi", &x, &total, &minus_first, job.rows, job.rows + 1, &job.columns, job.weights,
                          job.weights + 1, &threads))
        return NULL;
    job.x = (const float *)(uintptr_t)x, job.total = (float *)(uintptr_t)total;
    job.minus_first = (float *)(uintptr_t)minus_first;
    job.parts = worth_threads((int64_t)(job.rows[0] + job.rows[1]) * job.columns, threads);
    Py_BEGIN_ALLOW_THREADS
    in_parts(processor->sums, &job, job.parts);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_uniform(PyObject *module, PyObject *args)
{
    unsigned long long out, key;
    Py_ssize_t rows, lines, columns;
    unsigned int first_row, step, draw;
    if (!PyArg_ParseTuple(args, "KnnnKIII", &out, &rows, &lines, &columns, &key, &first_row, &step, &draw)) return NULL;
    const Uniform job = {(float *)(uintptr_t)out, lines, columns, key, first_row, step, draw};
    Py_BEGIN_ALLOW_THREADS
    processor->uniform(&job, 0, rows);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_processors(PyObject *module, PyObject *unused)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < PROCESSORS; i++) {
        PyObject *name = processors[i].there ? PyUnicode_FromString(processors[i].name) : NULL;
        if (processors[i].there && (name == NULL || PyList_Append(names, name))) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_use(PyObject *module, PyObject *name)
{
    for (int i = 0; PyUnicode_Check(name) && i < PROCESSORS; i++)
        if (processors[i].there && PyUnicode_CompareWithASCIIString(name, processors[i].name) == 0) {
            processor = processors + i;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "no such processor: %R", name);
}

static PyObject *py_workers(PyObject *module, PyObject *unused)
{
    return PyLong_FromLong(pool.process == getpid() ? pool.workers : 0);
}

static PyMethodDef methods[] = {
    {"workers", py_workers, METH_NOARGS, "Number of threads that wait for work in this process."},
    {"processors", py_processors, METH_NOARGS, "Kinds of processor that this code was made for and runs on, the best last."},
    {"use", py_use, METH_O, "Take the code for one of these kinds, for tests; the best is taken if nothing is said."},
    {"contrast", py_contrast, METH_O, "Gradient of one update, or draws of missing entries; the address of a Job."},
    {"step", py_step, METH_VARARGS, "Make a step: addresses of parameters, momenta and gradient, a tuple of (number, rate, weight "
     "decay) of parameters one after another, momentum, threads. The gradient becomes the former parameters. Returns 0, 1 if "
     "the gradient is not finite, and nothing has changed, or 2 if the new parameters are not finite."},
    {"binary", py_binary, METH_VARARGS, "Means of binary units times a scale, or draws: addresses of fields, bias, numbers (0 for "
     "means) and result, rows, columns, scale, threads."},
    {"sums", py_sums, METH_VARARGS, "Sums of the rows of two sides, one after the other, with weights: addresses of rows, of the "
     "result and of minus the first side's part (0 for none), rows of both sides, columns, weights of both sides, threads."},
    {"uniform", py_uniform, METH_VARARGS, "Fill an array with uniform random numbers: its address, rows, lines, columns, key, first "
     "row, step, draw."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    look_at_processor();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) ||
        PyModule_AddIntConstant(module, "PAD", PAD) ||
        PyModule_AddIntConstant(module, "job_size", sizeof(Job)) ||
        PyModule_AddIntConstant(module, "layer_size", sizeof(Layer))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
