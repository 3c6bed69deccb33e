/* Number of similar sequences of each sequence, for weights by sequence identity. identity.py defines the array layout.
 *
 * Each lane of a vector belongs to one sequence of a group. The vector counts at how many sites these sequences agree
 * with another sequence, which takes one comparison and one subtraction per site for all lanes. Counts are bytes, which
 * are added to wider counts before they overflow.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>

#define WIDTH 16      /* lanes of a vector; compilers split comparisons of wider vectors into single bytes */
#define PARTS 4       /* number of vectors per group */
#define LANES (WIDTH * PARTS)
#define LONGEST 255   /* largest count of a byte */
/* Unrolled loops over the vectors of a group, so that counts stay in registers. */
#define EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)

/* Compile several versions of a function. The dynamic loader selects the best one for the processor. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

typedef uint8_t Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));

/* For each sequence of a group, count the sequences that agree with it at `need` or more sites.
 *
 * group: (sites, LANES), the letters of the sequences in the group; others: (n, sites); found: (LANES). */
FOR_EVERY_PROCESSOR
static void count_group(const uint8_t *group, const uint8_t *others, int32_t *found, int64_t n, int64_t sites, int64_t need)
{
    for (int64_t row = 0; row < n; row++) {
        const uint8_t *other = others + row * sites;
        int32_t equal[LANES] = {0};
        for (int64_t start = 0; start < sites; start += LONGEST) {
            const int64_t stop = sites - start < LONGEST ? sites : start + LONGEST;
            Bytes counts[PARTS] = {{0}};
            for (int64_t site = start; site < stop; site++) {
                const Bytes *letters = (const Bytes *)(group + site * LANES);
                const Bytes letter = (Bytes){0} + other[site];
                EACH_PART counts[p] -= (Bytes)(letters[p] == letter);
            }
            const uint8_t *count = (const uint8_t *)counts;
            for (int lane = 0; lane < LANES; lane++) equal[lane] += count[lane];
        }
        for (int lane = 0; lane < LANES; lane++) found[lane] += equal[lane] >= (int32_t)need;
    }
}

static PyObject *py_count_similar(PyObject *module, PyObject *args)
{
    unsigned long long groups, others, found;
    Py_ssize_t n_groups, n, sites, need;
    if (!PyArg_ParseTuple(args, "KKKnnnn", &groups, &others, &found, &n_groups, &n, &sites, &need)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t g = 0; g < n_groups; g++)
        count_group((const uint8_t *)(uintptr_t)groups + g * sites * LANES, (const uint8_t *)(uintptr_t)others,
                    (int32_t *)(uintptr_t)found + g * LANES, n, sites, need);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"count_similar", py_count_similar, METH_VARARGS, "Count similar sequences. The arguments are addresses of arrays, sizes, and the number of sites that must agree."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_identity", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__identity(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddIntConstant(module, "LANES", LANES)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
