"""A Keras model in a loop of DistributedDataParallel, for PyTorch alone.

torchrun --nproc-per-node 2 examples/before/port_torch_ddp.py
"""

import keras
import torch
from keras import layers
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 64
EPOCHS = 6
TRAINED = 1408

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int64")
dataset = TensorDataset(torch.from_numpy(images[:TRAINED]), torch.from_numpy(labels[:TRAINED]))
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=BATCH_SIZE // world_size, sampler=sampler)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]
)
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
loss_function = torch.nn.CrossEntropyLoss()

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_function(replica(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {total / world_size / len(loader):.4f}")

if rank == 0:
    with torch.no_grad():
        predicted = model(torch.from_numpy(images[TRAINED:])).argmax(axis=1)
    accuracy = (predicted == torch.from_numpy(labels[TRAINED:])).float().mean()
    print(f"{world_size} replicas: test accuracy {accuracy:.4f}")
torch.distributed.destroy_process_group()
