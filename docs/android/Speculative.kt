// The speculative loop on an android package of `specstream package`, with ONNX Runtime's Java API. docs/android.md explains it.

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import android.system.Os
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.util.PriorityQueue
import kotlin.math.exp
import kotlin.math.ln
import kotlin.math.max
import kotlin.math.min

/** The numbers at the top of golden.json. */
class Sizes(
    val layers: Int, val streamLayers: Int, val kvHeads: Int, val headDim: Int, val hidden: Int, val capacity: Int,
    val gamma: Int, val topK: Int, val chunk: Int, val padSingle: Boolean, val stopIds: Set<Long>, val temperatures: DoubleArray
)

class Tree(val tokens: LongArray, val parents: IntArray)

/** What the streams say, flat: ids and logprobs [γ, k], pairs [γ, k, k] or null. */
class Streams(val ids: LongArray, val logprobs: FloatArray, val pairs: FloatArray?)

/** Both graphs and the cache they share. */
class Model(folder: File, private val n: Sizes, threads: Int) : AutoCloseable {
    private val env = OrtEnvironment.getEnvironment()
    private val main = open(File(folder, "model.ort"), threads)
    private val draft = open(File(folder, "streams.ort"), threads)
    private val caches = List(2 * n.layers) { direct(4 * n.kvHeads * n.capacity * n.headDim).asFloatBuffer() }
    private val tensors = caches.map {
        OnnxTensor.createTensor(env, it, longArrayOf(1, n.kvHeads.toLong(), n.capacity.toLong(), n.headDim.toLong()))
    }
    private var entry = direct(0).asFloatBuffer()  // entry_states of the last call
    private var last = 0                           // its row that was committed last
    var length = 0                                 // rows committed

    /** One call: a prompt's chunk or a tree. Returns the model's own token after each scored row. */
    fun run(tree: Tree, scored: LongArray): LongArray {
        val rows = tree.tokens.size
        check(length + rows <= n.capacity)
        if (n.padSingle && rows == 1 && length + 2 <= n.capacity) {  // a copy beside it, which sees and is seen by itself alone
            return run(Tree(tree.tokens + tree.tokens, intArrayOf(-1, -1)), longArrayOf(0, 1)).copyOf(1)
        }
        val mask = Array(rows) { BooleanArray(rows) }
        val depth = LongArray(rows)
        for (row in 0 until rows) {
            val parent = tree.parents[row]
            if (parent >= 0) {
                for (seen in 0..parent) mask[row][seen] = mask[parent][seen]
                depth[row] = depth[parent] + 1
            }
            mask[row][row] = true
        }
        val nextIds = direct(8 * scored.size).asLongBuffer()
        entry = direct(4 * rows * n.hidden).asFloatBuffer()
        val inputs = mapOf(
            "input_ids" to OnnxTensor.createTensor(env, arrayOf(tree.tokens)),
            "position_ids" to OnnxTensor.createTensor(env, arrayOf(LongArray(rows) { length + depth[it] })),
            "tree_mask" to OnnxTensor.createTensor(env, mask),
            "past_length" to OnnxTensor.createTensor(env, intArrayOf(length)),
            "logit_rows" to OnnxTensor.createTensor(env, scored)
        )
        val outputs = mapOf(
            "next_ids" to OnnxTensor.createTensor(env, nextIds, longArrayOf(scored.size.toLong())),
            "entry_states" to OnnxTensor.createTensor(env, entry, longArrayOf(rows.toLong(), n.hidden.toLong()))
        )
        call(main, inputs, outputs, 0 until n.layers)
        return LongArray(scored.size) { nextIds.get(it) }
    }

    /** Keep these rows of the last call, in this order; the others are forgotten. */
    fun commit(rows: List<Int>) {
        for (cache in caches) {
            for ((place, row) in rows.withIndex()) {
                if (row == place) continue
                for (head in 0 until n.kvHeads) {
                    val start = head * n.capacity + length
                    for (i in 0 until n.headDim) cache.put((start + place) * n.headDim + i, cache.get((start + row) * n.headDim + i))
                }
            }
        }
        length += rows.size
        last = rows.last()
    }

    /** Streams of the last committed row, about what comes after `root`; null where the cache has no room for their scratch rows. */
    fun streams(root: Long): Streams? {
        if (length + n.gamma > n.capacity) return null
        val count = n.gamma * n.topK
        val shape = longArrayOf(1, n.gamma.toLong(), n.topK.toLong())
        val ids = direct(8 * count).asLongBuffer()
        val logprobs = direct(4 * count).asFloatBuffer()
        val pairs = if ("stream_pairs" in draft.outputNames) direct(4 * count * n.topK).asFloatBuffer() else null
        val state = FloatArray(n.hidden) { entry.get(last * n.hidden + it) }
        val inputs = mapOf(
            "entry_state" to OnnxTensor.createTensor(env, arrayOf(state)),
            "root_id" to OnnxTensor.createTensor(env, longArrayOf(root)),
            "past_length" to OnnxTensor.createTensor(env, intArrayOf(length))
        )
        val outputs = mutableMapOf(
            "stream_ids" to OnnxTensor.createTensor(env, ids, shape),
            "stream_logprobs" to OnnxTensor.createTensor(env, logprobs, shape)
        )
        if (pairs != null) outputs["stream_pairs"] = OnnxTensor.createTensor(env, pairs, shape + n.topK.toLong())
        call(draft, inputs, outputs, n.layers - n.streamLayers until n.layers)
        return Streams(LongArray(count) { ids.get(it) }, floats(logprobs, count), pairs?.let { floats(it, count * n.topK) })
    }

    private fun call(session: OrtSession, inputs: Map<String, OnnxTensor>, outputs: Map<String, OnnxTensor>, layers: IntRange) {
        val past = layers.flatMap { listOf("past_key_values.$it.key" to tensors[2 * it], "past_key_values.$it.value" to tensors[2 * it + 1]) }
        val present = layers.flatMap { listOf("present.$it.key" to tensors[2 * it], "present.$it.value" to tensors[2 * it + 1]) }
        session.run(inputs + past, emptySet(), outputs + present).close()  // pinned outputs stay open
        (inputs.values + outputs.values).forEach { it.close() }
    }

    private fun open(file: File, threads: Int): OrtSession {
        val options = OrtSession.SessionOptions()
        options.setIntraOpNumThreads(threads)
        options.setMemoryPatternOptimization(false)
        options.addConfigEntry("session.use_memory_mapped_ort_model", "1")
        options.addConfigEntry("session.use_ort_model_bytes_for_initializers", "1")
        Os.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1", false)  // attention as in the traces; read when a session is made
        return env.createSession(file.path, options)
    }

    private fun direct(bytes: Int): ByteBuffer = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder())
    private fun floats(buffer: FloatBuffer, count: Int) = FloatArray(count) { buffer.get(it) }

    override fun close() {
        tensors.forEach { it.close() }
        draft.close()
        main.close()
    }
}

/** Text after a prompt, token by token; `emit` gets the tokens of each call. */
fun generate(model: Model, n: Sizes, prompt: LongArray, budget: Int, maxNewTokens: Int, emit: (List<Long>) -> Unit) {
    model.length = 0
    var root = 0L
    while (model.length < prompt.size) {  // the prompt is a chain; only its last row is scored
        val chunk = prompt.copyOfRange(model.length, min(model.length + n.chunk, prompt.size))
        root = model.run(Tree(chunk, IntArray(chunk.size) { it - 1 }), longArrayOf(chunk.size - 1L))[0]
        model.commit(chunk.indices.toList())
    }
    emit(listOf(root))
    var left = maxNewTokens - 1
    while (left > 0 && root !in n.stopIds && model.length < n.capacity) {
        val streams = if (left > 1 && budget > 1) model.streams(root) else null
        val tree = grow(root, streams, n, min(budget, n.capacity - model.length), left - 1)
        val next = model.run(tree, LongArray(tree.tokens.size) { it.toLong() })
        val accepted = mutableListOf(0)
        val emitted = mutableListOf(next[0])
        for (row in 1 until tree.tokens.size) {
            if (emitted.last() in n.stopIds) break
            if (tree.parents[row] == accepted.last() && tree.tokens[row] == emitted.last()) {
                accepted += row
                emitted += next[row]
            }
        }
        model.commit(accepted)
        emit(emitted)
        left -= emitted.size
        root = emitted.last()
    }
}

/** The likeliest `budget` nodes when depth d draws from stream d, best first; the likeliest chain comes first. */
fun grow(root: Long, streams: Streams?, n: Sizes, budget: Int, maxDepth: Int): Tree {
    val tokens = mutableListOf(root)
    val parents = mutableListOf(-1)
    if (streams == null) return Tree(tokens.toLongArray(), parents.toIntArray())
    val k = n.topK
    val paths = mutableListOf(0.0)
    val depths = mutableListOf(0)
    val chosen = mutableListOf(-1)  // which candidate of its stream a row is
    val logprobs = calibrated(streams.logprobs, n)
    val known = HashMap<Pair<Int, Int>, DoubleArray>()
    val heap = PriorityQueue<Triple<Double, Int, IntArray>>(compareBy({ -it.first }, { it.second }))

    fun below(parent: Int) = known.getOrPut(depths[parent] to chosen[parent]) {
        conditioned(logprobs, streams.pairs, depths[parent], chosen[parent], k)
    }
    fun push(parent: Int, rank: Int) {
        if (depths[parent] >= min(n.gamma, maxDepth)) return
        val scores = below(parent)
        val b = scores.indices.sortedByDescending { scores[it] }.getOrNull(rank) ?: return
        heap += Triple(paths[parent] + scores[b], 2 * tokens.size + (if (rank > 0) 1 else 0), intArrayOf(parent, rank, b))
    }
    push(0, 0)
    while (heap.isNotEmpty() && tokens.size < budget) {
        val (path, _, node) = heap.poll()
        val (parent, rank, b) = node
        val row = tokens.size
        tokens += streams.ids[depths[parent] * k + b]
        parents += parent
        paths += path
        depths += depths[parent] + 1
        chosen += b
        push(row, 0)
        push(parent, rank + 1)
    }
    val order = mutableListOf(0)
    while (true) {
        val children = parents.indices.filter { parents[it] == order.last() }
        order += children.sortedByDescending { paths[it] }.firstOrNull() ?: break
    }
    order += tokens.indices.filter { it !in order.toSet() }
    val place = order.withIndex().associate { (i, row) -> row to i }
    return Tree(LongArray(order.size) { tokens[order[it]] }, IntArray(order.size) { if (it == 0) -1 else place.getValue(parents[order[it]]) })
}

/** Log-probabilities at each stream's temperature; what is outside the top k is one more outcome. */
fun calibrated(logprobs: FloatArray, n: Sizes): FloatArray {
    if (n.temperatures.all { it == 1.0 }) return logprobs
    val found = FloatArray(logprobs.size)
    for (stream in 0 until n.gamma) {
        val power = 1 / n.temperatures[stream]
        val p = DoubleArray(n.topK) { exp(logprobs[stream * n.topK + it].toDouble()) }
        val rest = Math.pow(max(1 - p.sum(), 0.0), power)
        val total = p.map { Math.pow(it, power) }.sum() + rest
        for (b in p.indices) found[stream * n.topK + b] = ln(Math.pow(p[b], power) / total).toFloat()
    }
    return found
}

/** Log-probabilities of a stream's candidates below candidate `a` of the stream before it (-1: below the root). */
fun conditioned(logprobs: FloatArray, pairs: FloatArray?, stream: Int, a: Int, k: Int): DoubleArray {
    val own = DoubleArray(k) { logprobs[stream * k + it].toDouble() }
    if (pairs == null || a < 0) return own
    val rest = max(1 - own.map { exp(it) }.sum(), 0.0)
    val scores = DoubleArray(k) { own[it] + pairs[(stream * k + a) * k + it] }
    val total = ln(scores.map { exp(it) }.sum() + rest)
    return DoubleArray(k) { scores[it] - total }
}
