/* Kernels for one instruction set. _native.c includes this file once per instruction set, after defining
 *   NAME(x)  the name of a function for this instruction set,
 *   LANES    the number of floats in a vector register,
 *   ROWS     the number of rows of a product kept in registers (two vectors per row),
 *   GK, GI   the number of rows and columns in a register block for the gradient with respect to U.
 *
 * Each sample is a matrix whose rows are padded to a multiple of PAD. All arrays for one sample stay in the L1 cache. The
 * padding of states contains finite values, which have no effect because the padding of V is zero.
 */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES)));
#define vec NAME(vec)
#define ivec NAME(ivec)

INLINE vec NAME(load)(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void NAME(store)(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec NAME(all)(float x) { return x - (vec){}; }
INLINE vec NAME(pick)(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }

/* -- products ------------------------------------------------------------------------------------------------ */

/* Compute a tile of a matrix product, of shape (rows, wide * LANES), in registers. The function is inlined so that
 * constant arguments are known at compile time. */
INLINE void NAME(tile)(int rows, int wide, int inner, const float *a, long down, long across,
                       const float *b, long b_row, float *out, long out_row, int add)
{
    vec sum[ROWS][2], right[2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int w = 0; w < wide; w++) sum[r][w] = add ? NAME(load)(out + r * out_row + w * LANES) : (vec){};
    for (int c = 0; c < inner; c++) {
#pragma GCC unroll 2
        for (int w = 0; w < wide; w++) right[w] = NAME(load)(b + c * b_row + w * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec left = NAME(all)(a[r * down + c * across]);
#pragma GCC unroll 2
            for (int w = 0; w < wide; w++) sum[r][w] += left * right[w];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int w = 0; w < wide; w++) NAME(store)(out + r * out_row + w * LANES, sum[r][w]);
}

/* Compute wide * LANES columns of a matrix product. */
INLINE void NAME(column)(int wide, int rows, int inner, const float *a, long down, long across,
                         const float *b, long b_row, float *out, long out_row, int add)
{
    int blocks = (rows + ROWS - 1) / ROWS;
    for (int first = 0; blocks; blocks--) { /* use blocks of nearly equal height, because a block of one row is slow */
        int height = (rows - first) / blocks;
        const float *left = a + first * down;
        float *into = out + first * out_row;
#define TILE(n) case n: NAME(tile)(n, wide, inner, left, down, across, b, b_row, into, out_row, add); break;
        switch (height) {
            TILE(1) TILE(2) TILE(3) TILE(4) TILE(5)
#if ROWS > 5
            TILE(6)
#endif
#if ROWS > 6
            TILE(7) TILE(8)
#endif
        }
#undef TILE
        first += height;
    }
}

/* Compute out = a b or out += a b, where out has shape (rows, width), a[r][c] is at a[r * down + c * across], and b has
 * shape (inner, width). The width must be a multiple of PAD. */
static void NAME(product)(int rows, int inner, int width, const float *a, long down, long across,
                          const float *b, float *out, int add)
{
    int at = 0;
    for (; at + 2 * LANES <= width; at += 2 * LANES)
        NAME(column)(2, rows, inner, a, down, across, b + at, width, out + at, width, add);
    if (at < width) NAME(column)(1, rows, inner, a, down, across, b + at, width, out + at, width, add);
}

/* Compute a block, of shape (high, wide), of the sum of G X' over samples, in registers. */
INLINE void NAME(block)(int high, int wide, int count, int vectors, const float *g, long g_row, long g_sample,
                        const float *x, long x_row, long x_sample, float *out, long out_row)
{
    vec sum[GK][GI], right[GI];
#pragma GCC unroll 8
    for (int p = 0; p < high; p++)
#pragma GCC unroll 8
        for (int q = 0; q < wide; q++) sum[p][q] = (vec){};
    for (int s = 0; s < count; s++)
        for (int v = 0; v < vectors; v++) {
            const float *gs = g + s * g_sample + v * LANES, *xs = x + s * x_sample + v * LANES;
#pragma GCC unroll 8
            for (int q = 0; q < wide; q++) right[q] = NAME(load)(xs + q * x_row);
#pragma GCC unroll 8
            for (int p = 0; p < high; p++) {
                vec left = NAME(load)(gs + p * g_row);
#pragma GCC unroll 8
                for (int q = 0; q < wide; q++) sum[p][q] += left * right[q];
            }
        }
#pragma GCC unroll 8
    for (int p = 0; p < high; p++)
#pragma GCC unroll 8
        for (int q = 0; q < wide; q++) {
            float total = 0;
            for (int i = 0; i < LANES; i++) total += sum[p][q][i];
            out[p * out_row + q] += total;
        }
}

/* Add the sum of G X' over samples to out, of shape (K, I). G has shape (count, K, width), and X has shape
 * (count, I, width). */
static void NAME(outer)(int K, int I, int count, int width, const float *g, long g_sample,
                        const float *x, long x_sample, float *out)
{
    for (int k = 0, high; k < K; k += high) {
        high = K - k >= GK ? GK : 1;
        for (int i = 0, wide; i < I; i += wide) {
            wide = I - i >= GI ? GI : 1;
#define BLOCK(h, w) NAME(block)(h, w, count, width / LANES, g + k * width, width, g_sample, x + i * width, width, x_sample, \
                                out + k * I + i, I)
            if (high == GK && wide == GI) BLOCK(GK, GI);
            else if (high == GK) BLOCK(GK, 1);
            else if (wide == GI) BLOCK(1, GI);
            else BLOCK(1, 1);
#undef BLOCK
        }
    }
}

/* -- units --------------------------------------------------------------------------------------------------- */

/* Compute exp(-x) from a power of two and a polynomial, as in the Cephes library, with an error of at most 2 ulp. The
 * result for NaN does not matter, because the gradients are NaN in that case. */
INLINE vec NAME(exp_minus)(vec x)
{
    const vec least = NAME(all)(-87.0f), most = NAME(all)(88.0f), rounder = NAME(all)(12582912.0f);
    x = -x;
    x = NAME(pick)(x < least, least, x);
    x = NAME(pick)(x > most, most, x);
    vec shifted = x * 1.44269504f + rounder, whole = shifted - rounder;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f, p = NAME(all)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23)); /* the low bits of `shifted` contain the power of two */
}

/* Write the random numbers for drawing a layer of one sample to `spare`, and return it. It has enough space to read whole
 * vectors past the end of the numbers. */
INLINE const float *NAME(numbers_of)(const Job *job, int draw, int sample, int lines, int columns, float *spare)
{
    const float *normal = job->normal[draw];
    if (normal) {
        memcpy(spare, normal + (long)sample * lines * columns, sizeof(float) * lines * columns);
        return spare;
    }
    /* When drawing missing entries, the first step does not draw the hidden layer, so that draw is not counted. */
    const Uniform row = {spare, lines, columns, job->key, job->first_row + sample, job->update,
                         job->first_draw + draw - (job->filling ? 1 : 0)};
    NAME(uniform)(&row, 0, 1);
    return spare;
}

/* Sample a category from the fields and a random number, and overwrite the fields with the one-hot result. */
INLINE void NAME(draw_category)(int categories, float *field, float number)
{
    float most = field[0], total = 0, sum = 0;
    int chosen = 0;
    for (int c = 1; c < categories; c++) most = field[c] > most ? field[c] : most;
    for (int at = 0; at < categories; at += LANES) { /* do not read past the last category */
        const size_t bytes = sizeof(float) * (categories - at < LANES ? categories - at : LANES);
        vec own = {};
        memcpy(&own, field + at, bytes);
        own = NAME(exp_minus)(most - own);
        memcpy(field + at, &own, bytes);
    }
    for (int c = 0; c < categories; c++) total += field[c];
    for (int c = 0; c < categories - 1; c++) chosen += number * total >= (sum += field[c]);
    memset(field, 0, sizeof(float) * categories);
    field[chosen] = 1;
}

/* Sample a layer of shape (rows, columns) from fields of shape (rows, width). `into` has the shape of `field`, and may
 * alias it. */
static void NAME(draw)(int gaussian, int rows, int columns, int width, const float *field, const float *numbers, float *into)
{
    const vec one = NAME(all)(1.0f);
    for (int r = 0; r < rows; r++)
        for (int at = 0; at < width; at += LANES) {
            vec f = NAME(load)(field + r * width + at), u = NAME(load)(numbers + r * columns + at);
            /* u < sigmoid(f), computed without a division */
            vec drawn = gaussian ? f + u : (vec)((u * (1.0f + NAME(exp_minus)(f)) < one) & (ivec)one);
            NAME(store)(into + r * width + at, drawn);
        }
}

/* -- gradient descent steps, as defined in updates/step.py ------------------------------------------------------- */

/* Set `broken` to 1 if the given part of the gradient is not finite. */
static void NAME(check)(const void *work, int part)
{
    const Step *step = work;
    const int64_t last = step->count * (part + 1) / step->parts;
    uint32_t broken = 0;
    for (int64_t i = step->count * part / step->parts; i < last; i++) broken |= is_broken(step->gradient + i);
    if (broken) atomic_store(step->broken, 1);
}

/* Update the given part of the parameters in a single pass, and overwrite the gradient with the previous parameters. The
 * parentheses leave the compiler only one way to use fused multiply-adds, so that the rounding does not depend on where a
 * part begins. */
static void NAME(step)(const void *work, int part)
{
    const Step *step = work;
    const float momentum = step->momentum;
    float *restrict p = step->params, *restrict m = step->momenta, *restrict g = step->gradient;
    const int64_t last = step->count * (part + 1) / step->parts;
    uint32_t broken = 0;
    int64_t i = step->count * part / step->parts;
    for (const Segment *segment = step->segments; i < last; segment++) {
        const float rate = segment->rate, decay = segment->decay;
        for (const int64_t end = segment->end < last ? segment->end : last; i < end; i++) {
            const float old = p[i];
            m[i] = momentum * m[i] + (g[i] + decay * old);
            p[i] = old - rate * m[i];
            g[i] = old;
            broken |= is_broken(p + i);
        }
    }
    if (broken) atomic_store(step->broken, 2);
}

/* -- samples ------------------------------------------------------------------------------------------------ */

/* Find the next run of nonzero entries, set `from` to its start, and return its length. One-hot rows have few nonzero
 * entries. */
INLINE int NAME(next_run)(const float *x, int count, int *from)
{
    int end = *from;
    while (end < count && x[end] == 0) end++;
    for (*from = end; end < count && x[end] != 0;) end++;
    return end - *from;
}

/* Compute the hidden field C + sum U X V', of shape (K, Lp), for the given states, and store the products U X for the
 * gradient. Dense weights have one row of K * Lp floats per visible entry. */
static void NAME(upwards)(const Job *job, const Scratch *own, const float *states)
{
    const int K = job->K, Lp = PADDED(job->L);
    memcpy(own->field, job->packed + job->c_at, sizeof(float) * K * Lp);
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int Jp = PADDED(layer->J);
        if (!layer->U) {
            const float *x = states + layer->states_at, *wt = job->packed + layer->vt_at;
            for (int j = 0, run; (run = NAME(next_run)(x, layer->J, &j)); j += run)
                NAME(product)(1, run, K * Lp, x + j, 0, 1, wt + (long)j * K * Lp, own->field, 1);
            continue;
        }
        for (int r = 0; r < layer->rank; r++) {
            float *ux = own->products + layer->products_at + (long)r * K * Jp;
            NAME(product)(K, layer->I, Jp, layer->U + (long)r * K * layer->I, layer->I, 1, states + layer->states_at, ux, 0);
            NAME(product)(K, layer->J, Lp, ux, Jp, 1, job->packed + layer->vt_at + (long)r * layer->J * Lp, own->field, 1);
        }
    }
}

/* Sample a visible layer of shape (I, Jp) from its field, which is overwritten. */
static void NAME(draw_visible)(const Job *job, const Scratch *own, int m, int sample, int step, float *x)
{
    const Layer *layer = job->layers + m;
    const int I = layer->I, J = layer->J, Jp = PADDED(J), sites = I * J / layer->categories, across = J / layer->categories;
    const int draw = step * (1 + job->n_layers) + 1 + m;
    const float *numbers = NAME(numbers_of)(job, draw, sample, layer->lines, layer->columns, own->spare);
    if (layer->kind == CATEGORICAL)
        for (int site = 0; site < sites; site++)
            NAME(draw_category)(layer->categories, x + site / across * Jp + site % across * layer->categories, numbers[site]);
    else
        NAME(draw)(layer->kind == GAUSSIAN, I, J, Jp, x, numbers, x);
    if (layer->scale && layer->kind != GAUSSIAN)
        for (int i = 0; i < I; i++)
            for (int j = 0; j < J; j++) x[i * Jp + j] -= layer->shift[i * J + j];
}

/* Sample all visible layers given the hidden layer, of shape (K, Lp). */
static void NAME(downwards)(const Job *job, const Scratch *own, const float *hidden, int sample, int step, float *states)
{
    const int K = job->K, L = job->L, Lp = PADDED(L);
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int I = layer->I, J = layer->J, Jp = PADDED(J);
        float *x = states + layer->states_at;
        memcpy(x, job->packed + layer->b_at, sizeof(float) * I * Jp);
        if (!layer->U) NAME(outer)(J, 1, 1, K * Lp, job->packed + layer->vt_at, 0, hidden, 0, x);
        for (int r = 0; layer->U && r < layer->rank; r++) {
            NAME(product)(K, L, Jp, hidden, Lp, 1, job->packed + layer->v_at + (long)r * L * Jp, own->half, 0);
            NAME(product)(I, K, Jp, layer->U + (long)r * K * I, 1, I, own->half, x, 1);
        }
        NAME(draw_visible)(job, own, m, sample, step, x);
    }
}

/* Sample the hidden layer from its field. */
static void NAME(draw_hidden)(const Job *job, const Scratch *own, int sample, int step)
{
    const int K = job->K, L = job->L;
    const float *numbers = NAME(numbers_of)(job, step * (1 + job->n_layers), sample, job->lines, job->columns, own->spare);
    NAME(draw)(job->gaussian, K, L, PADDED(L), own->field, numbers, own->hidden);
}

/* Run the Gibbs steps for one chain, starting from its hidden field. */
static void NAME(gibbs)(const Job *job, const Scratch *own, int sample, float *states)
{
    for (int step = 0; step < job->steps; step++) {
        NAME(draw_hidden)(job, own, sample, step);
        NAME(downwards)(job, own, own->hidden, sample, step, states);
        NAME(upwards)(job, own, states);
    }
}

/* Add one sample's contribution to the sums for the variance gradient. `own->spare` is used to compute the field. */
static void NAME(spread)(const Job *job, const Scratch *own, const Layer *layer, const float *x, const float *kept,
                         float weight, float *to_s)
{
    const int K = job->K, I = layer->I, J = layer->J, Jp = PADDED(J);
    clear(own->spare, I * Jp);
    if (!layer->U) NAME(outer)(J, 1, 1, K * PADDED(job->L), job->packed + layer->vt_at, 0, own->hidden, 0, own->spare);
    for (int r = 0; layer->U && r < layer->rank; r++)
        NAME(product)(I, K, Jp, layer->U + (long)r * K * I, 1, I, kept + layer->products_at + (long)r * K * Jp, own->spare, 1);
    for (int at = 0; at < I * Jp; at += LANES) {
        vec t = NAME(load)(x + at), field = NAME(load)(own->spare + at);
        NAME(store)(to_s + at, NAME(load)(to_s + at) + t * (field - weight * t));
    }
}

/* Add one sample's contribution to the gradients of V and all biases, and store H V, where H is the hidden mean, for the
 * gradient of U. `to_c` is the gradient of the hidden bias, which is accumulated separately for the data and the chains. */
static void NAME(slopes)(const Job *job, const Scratch *own, const float *states, float *kept, float weight, float *gradient,
                         float *to_c)
{
    const int K = job->K, L = job->L, Lp = PADDED(L);
    for (int at = 0; at < K * Lp; at += LANES) {
        vec field = NAME(load)(own->field + at);
        vec mean = weight * (job->gaussian ? field : 1.0f / (1.0f + NAME(exp_minus)(field)));
        NAME(store)(own->hidden + at, mean);
        NAME(store)(to_c + at, NAME(load)(to_c + at) + mean);
    }
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int Jp = PADDED(layer->J);
        const float *x = states + layer->states_at;
        float *to_b = gradient + layer->to_b_at;
        for (int at = 0; at < layer->I * Jp; at += LANES)
            NAME(store)(to_b + at, NAME(load)(to_b + at) + weight * NAME(load)(x + at));
        for (int j = 0, run; !layer->U && (run = NAME(next_run)(x, layer->J, &j)); j += run)
            NAME(product)(run, 1, K * Lp, x + j, 1, 0, own->hidden, gradient + layer->to_v_at + (long)j * K * Lp, 1);
        for (int r = 0; layer->U && r < layer->rank; r++) {
            const float *ux = own->products + layer->products_at + (long)r * K * Jp;
            const float *v = job->packed + layer->v_at + (long)r * L * Jp;
            NAME(product)(L, K, Jp, own->hidden, 1, Lp, ux, gradient + layer->to_v_at + (long)r * L * Jp, 1);
            NAME(product)(K, L, Jp, own->hidden, Lp, 1, v, kept + layer->products_at + (long)r * K * Jp, 0);
        }
        if (layer->to_S) NAME(spread)(job, own, layer, x, kept, weight, gradient + layer->to_s_at);
    }
}

/* Copy a data sample to padded rows and convert it to states. */
static void NAME(read)(const Job *job, int sample, float *states)
{
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int J = layer->J, Jp = PADDED(J);
        for (int i = 0; i < layer->I; i++) {
            const float *row = layer->data + ((long)sample * layer->I + i) * J;
            float *x = states + layer->states_at + (long)i * Jp;
            memcpy(x, row, sizeof(float) * J);
            if (layer->scale)
                for (int j = 0; j < J; j++) x[j] = x[j] * layer->scale[i * J + j] - layer->shift[i * J + j];
        }
    }
}

/* -- missing entries ------------------------------------------------------------------------------------------ */

/* Copy the known entries of a sample from other states. */
static void NAME(keep_known)(const Job *job, int sample, const float *from, float *states)
{
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int I = layer->I, J = layer->J, Jp = PADDED(J);
        const uint8_t *known = layer->known ? layer->known + (long)sample * I * J : NULL;
        for (int i = 0; i < I; i++)
            for (int j = 0; j < J; j++) {
                const int64_t at = layer->states_at + (int64_t)i * Jp + j;
                if (!known || known[i * J + j]) states[at] = from[at];
            }
    }
}

/* Draw the missing entries of a sample and write them to the data. The first draw uses only the visible biases. Gibbs
 * steps follow. */
static void NAME(fill)(const Job *job, const Scratch *own, int sample)
{
    float *x = own->states, *data = own->states + job->states; /* there is space for at least two samples */
    NAME(read)(job, sample, data);
    for (int step = 0; step <= job->steps; step++) {
        if (step == 0)
            for (int m = 0; m < job->n_layers; m++) {
                const Layer *layer = job->layers + m;
                memcpy(x + layer->states_at, job->packed + layer->b_at, sizeof(float) * layer->I * PADDED(layer->J));
                NAME(draw_visible)(job, own, m, sample, step, x + layer->states_at);
            }
        else {
            NAME(upwards)(job, own, x);
            NAME(draw_hidden)(job, own, sample, step);
            NAME(downwards)(job, own, own->hidden, sample, step, x);
        }
        NAME(keep_known)(job, sample, data, x);
    }
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        for (int i = 0; i < layer->I; i++)
            for (int j = 0; j < layer->J; j++) {
                const int at = i * layer->J + j;
                float *place = layer->data + (long)sample * layer->I * layer->J + at;
                const float drawn = x[layer->states_at + (long)i * PADDED(layer->J) + j];
                if (layer->known && !layer->known[place - layer->data])
                    *place = layer->scale ? (drawn + layer->shift[at]) / layer->scale[at] : drawn;
            }
    }
}

/* -- chunks of samples and chains, each with a separate gradient ---------------------------------------------------- */

/* Add the contribution of a group of `count` samples to the gradients of U. */
static void NAME(flush)(const Job *job, const Scratch *own, int count, float *gradient)
{
    for (int m = 0; m < job->n_layers; m++) {
        const Layer *layer = job->layers + m;
        const int Jp = PADDED(layer->J);
        for (int r = 0; layer->U && r < layer->rank; r++)
            NAME(outer)(job->K, layer->I, count, Jp, own->kept + layer->products_at + (long)r * job->K * Jp, job->products,
                        own->states + layer->states_at, job->states,
                        gradient + layer->to_u_at + (long)r * job->K * layer->I);
    }
}

/* Compute the gradient for one chunk of samples and chains, or draw the missing entries of its samples. */
static void NAME(chunk)(const Job *job, const Scratch *own, int number)
{
    float *gradient = job->gradients + (long)number * job->gradient_size;
    const int data_from = PART(job->n_data, number, job->chunks), data_to = PART(job->n_data, number + 1, job->chunks);
    const int chain_from = PART(job->n_chains, number, job->chunks), chain_to = PART(job->n_chains, number + 1, job->chunks);
    int count = 0;
    if (job->filling) {
        for (int s = data_from; s < data_to; s++) NAME(fill)(job, own, s);
        return;
    }
    memset(gradient, 0, sizeof(float) * job->gradient_size);
#define STATES (own->states + count * job->states)
#define KEPT (own->kept + count * job->products)
#define COUNT_ONE() if (++count == job->group) { NAME(flush)(job, own, count, gradient); count = 0; }
    for (int s = data_from; s < data_to; s++) {
        NAME(read)(job, s, STATES);
        NAME(upwards)(job, own, STATES);
        NAME(slopes)(job, own, STATES, KEPT, -job->data_weight, gradient, gradient + job->to_mean_at);
        COUNT_ONE()
        if (!job->chains) { /* contrastive divergence: the chain starts from the hidden field of the data */
            NAME(gibbs)(job, own, s, STATES);
            NAME(slopes)(job, own, STATES, KEPT, job->chain_weight, gradient, gradient + job->to_c_at);
            COUNT_ONE()
        }
    }
    if (job->chains)
        for (int s = chain_from; s < chain_to; s++) {
            float *chain = job->chains + s * job->states;
            NAME(upwards)(job, own, chain);
            NAME(gibbs)(job, own, s, chain);
            memcpy(STATES, chain, sizeof(float) * job->states);
            NAME(slopes)(job, own, STATES, KEPT, job->chain_weight, gradient, gradient + job->to_c_at);
            COUNT_ONE()
        }
    if (count) NAME(flush)(job, own, count, gradient);
#undef STATES
#undef KEPT
#undef COUNT_ONE
}

#undef vec
#undef ivec
#undef NAME
#undef LANES
#undef ROWS
#undef GK
#undef GI
