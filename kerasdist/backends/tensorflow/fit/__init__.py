"""What `fit` does on TensorFlow: batches, steps, gradients."""
