"""TensorFlow: MultiWorkerMirroredStrategy, which finds the workers by TF_CONFIG, and a checkpoint.

ray-on-ecs run --local --num-workers 2 --requirements examples/tensorflow.txt examples/tensorflow_workers.py

TensorFlow keeps a checkpoint of each worker; a restart reads that of rank 0.
"""

import argparse

import tensorflow as tf

BATCH = 64


def main() -> None:
    """Fit a line to noisy points, the batches divided among the workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id or 0
    x = tf.random.stateless_normal((4096, 8), seed=(0, 0))
    y = tf.reduce_sum(x, axis=1, keepdims=True) + 0.1 * tf.random.stateless_normal((4096, 1), seed=(0, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096, seed=0).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(data)
    with strategy.scope():
        weights = tf.Variable(tf.zeros((8, 1)))
        bias = tf.Variable(0.0)
        epoch = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.matmul(x, weights) + bias - y) ** 2) / BATCH
            gradients = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, [weights, bias]))
            for variable, gradient in zip((weights, bias), gradients, strict=True):
                variable.assign_sub(0.01 * gradient)
            return loss

        return strategy.reduce("sum", strategy.run(replica, args=batch), axis=None)

    # A restart reads rank 0's; the others must save as well, elsewhere.
    checkpoint = tf.train.Checkpoint(weights=weights, bias=bias, epoch=epoch)
    manager = tf.train.CheckpointManager(checkpoint, f"rank-{rank}", max_to_keep=2)
    if saved := tf.train.latest_checkpoint("rank-0"):
        checkpoint.restore(saved)
        print(f"rank {rank}: resuming at epoch {epoch.numpy()}")

    for number in range(int(epoch.numpy()), epochs):
        losses = [step(batch).numpy() for batch in batches]
        if rank == 0:
            print(f"epoch {number}: loss {sum(losses) / len(losses):.4f}")
        epoch.assign(number + 1)
        manager.save()


if __name__ == "__main__":
    main()
