"""A residual network with BatchNorm, and a U-Net with GroupNorm, ConvTranspose, Upsample and skips."""

# mypy: disable-error-code="no-any-return"
# (calling a torch.nn.Module is typed as Any)

import torch
from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[B,C,H,W] -> [B,out,H/stride,W/stride]`."""
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


class Resnet(nn.Module):
    """A classifier of images."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = BasicBlock(width, width, 1)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.layer3 = BasicBlock(2 * width, 2 * width, 1)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, 8)

    def forward(self, images: Tensor) -> Tensor:
        """`[B,3,H,W] -> [B,8]`."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(images))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class UnetBlock(nn.Module):
    """Norm, SiLU and convolution twice, with a shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,C,H,W] -> [B,out,H,W]`."""
        inner = self.conv1(functional.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(inner)))


class Unet(nn.Module):
    """Two levels down and up: the first way up is Upsample and Conv, the second ConvTranspose."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = UnetBlock(width, width)
        self.pool1 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2 = UnetBlock(width, 2 * width)
        self.pool2 = nn.MaxPool2d(2)
        self.middle = UnetBlock(2 * width, 2 * width)
        self.up2 = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(2 * width, width, 3, padding=1))
        self.right2 = UnetBlock(3 * width, width)
        self.up1 = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.right1 = UnetBlock(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """`[B,3,H,W] -> [B,3,H,W]`."""
        first = self.down1(self.stem(images))
        second = self.down2(self.pool1(first))
        x = self.middle(self.pool2(second))
        x = self.right2(torch.cat((self.up2(x), second), dim=1))
        return self.head(self.right1(torch.cat((self.up1(x), first), dim=1)))
