/* Uniform random numbers: Philox 4x32 with ten rounds, as random/philox.py defines them. The two agree bit for bit.
 *
 * Plain C with the vector types of GCC and Clang. One vector holds the same word of eight counters.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define ROUNDS 10
#define LOW 0xffffffffu /* the lower half of 64 bits */

/* The loader picks the best version for the processor. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint64_t Pairs __attribute__((vector_size(4 * LANES))); /* two neighboring words each */

/* Upper and lower halves of the products of all words with a number. */
INLINE void multiply(const Words *words, uint32_t number, Words *high, Words *low)
{
    const Pairs pairs = (Pairs)*words;
    const Pairs even = (pairs & LOW) * (uint64_t)number;
    const Pairs odd = (pairs >> 32) * (uint64_t)number;
    *high = (Words)((even >> 32) | (odd & ~(uint64_t)LOW));
    *low = (Words)((even & LOW) | (odd << 32));
}

INLINE void to_unit_interval(const Words *words, Floats *numbers)
{
    *numbers = (__builtin_convertvector((Ints)(*words >> 9), Floats) + 0.5f) * 0x1p-23f;
}

/* The numbers of eight counters (quad + 0..7, row, step, draw), four of each counter side by side. */
INLINE void eight_counters(uint32_t quad, uint32_t row, uint32_t step, uint32_t draw, uint64_t key, float *out)
{
    const Words zero = {0};
    Words c0 = (Words){0, 1, 2, 3, 4, 5, 6, 7} + quad;
    Words c1 = zero + row;
    Words c2 = zero + step;
    Words c3 = zero + draw;
    uint32_t k0 = (uint32_t)key;
    uint32_t k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        Words high0, low0, high1, low1;
        multiply(&c0, 0xD2511F53u, &high0, &low0);
        multiply(&c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Floats a, b, c, d;
    to_unit_interval(&c0, &a);
    to_unit_interval(&c1, &b);
    to_unit_interval(&c2, &c);
    to_unit_interval(&c3, &d);
    const Floats ab0 = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    const Floats ab1 = SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    const Floats cd0 = SHUFFLE(c, d, 0, 8, 1, 9, 2, 10, 3, 11);
    const Floats cd1 = SHUFFLE(c, d, 4, 12, 5, 13, 6, 14, 7, 15);
    const Floats found[4] = {
        SHUFFLE(ab0, cd0, 0, 1, 8, 9, 2, 3, 10, 11),
        SHUFFLE(ab0, cd0, 4, 5, 12, 13, 6, 7, 14, 15),
        SHUFFLE(ab1, cd1, 0, 1, 8, 9, 2, 3, 10, 11),
        SHUFFLE(ab1, cd1, 4, 5, 12, 13, 6, 7, 14, 15),
    };
    memcpy(out, found, sizeof found);
}

FOR_EVERY_PROCESSOR
static void uniform(float *out, int64_t rows, int64_t lines, int64_t columns, uint64_t key, uint32_t first_row, uint32_t step,
                    uint32_t draw)
{
    const int64_t quads = (columns + 3) / 4;
    const int64_t per_row = lines * quads;
    const float *const end = out + rows * lines * columns;
    float numbers[4 * LANES];
    for (int64_t row = 0; row < rows; row++) {
        int64_t column = 0;
        for (int64_t quad = 0; quad < per_row; quad += LANES) {
            const int64_t count = per_row - quad < LANES ? per_row - quad : LANES;
            if (columns % 4 == 0 && count == LANES) { /* whole lines without a remainder: no copy is needed */
                eight_counters((uint32_t)quad, first_row + (uint32_t)row, step, draw, key, out);
                out += 4 * LANES;
                continue;
            }
            eight_counters((uint32_t)quad, first_row + (uint32_t)row, step, draw, key, numbers);
            for (int64_t i = 0; i < count; i++) {
                const int64_t left = columns - column < 4 ? columns - column : 4;
                /* Copying four numbers is fastest; the next line overwrites those beyond the end of this one. */
                if (out + 4 <= end) memcpy(out, numbers + 4 * i, 4 * sizeof(float));
                else memcpy(out, numbers + 4 * i, left * sizeof(float));
                out += left;
                column = column + 4 < columns ? column + 4 : 0;
            }
        }
    }
}

static PyObject *py_uniform(PyObject *module, PyObject *args)
{
    unsigned long long out, key;
    Py_ssize_t rows, lines, columns;
    unsigned int first_row, step, draw;
    if (!PyArg_ParseTuple(args, "KnnnKIII", &out, &rows, &lines, &columns, &key, &first_row, &step, &draw)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    uniform((float *)(uintptr_t)out, rows, lines, columns, key, first_row, step, draw);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"uniform", py_uniform, METH_VARARGS,
     "Fill an array of floats: its address, rows, lines, columns, key, first row, step, draw."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_random", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__random(void) { return PyModule_Create(&definition); }
