"""All uses of TensorFlow's private API; tests fail if TensorFlow changes any of them."""
