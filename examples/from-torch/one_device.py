"""A script for one device. one_device.diff takes it to many:

python one_device.py
patch one_device.py one_device.diff
paceline run -n 2 one_device.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
train_loader = DataLoader(train, batch_size=96, shuffle=True)
test_loader = DataLoader(test, batch_size=96)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(x.to(device)).argmax(1).cpu() for x, _ in test_loader])
    right = (guesses == labels[1440:]).sum().item()
    print(f"epoch {epoch}: {right} of {len(test)} right")
torch.save(model.state_dict(), "weights.pt")
