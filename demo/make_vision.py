"""Makes demo/vision/photos from two Debian packages and two wheels: real photos, cropped and scaled down.

python demo/make_vision.py FOLDER    (holds the .deb and .whl files; see demo/README.md for their names; needs dpkg-deb)
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
ORIENTATION = 0x0112
ROTATED_BY_90 = 6
"""The value of EXIF 2.3's Orientation for rows that run down the right side: a viewer turns the photo clockwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Photo:
    """One photo: where it comes from, and how it is changed; None for what stays."""

    source: str
    """File name in a package."""
    long_side: int | None = None
    """The long side of the result, in pixels."""
    crop: tuple[float, float, float, float] | None = None
    """Left, top, right and bottom of what is kept, as fractions of the original."""
    quality: int = 80
    turned: bool = False
    """Stored on its side, with an EXIF orientation that puts it upright."""


PHOTOS = {
    "bird.jpg": Photo(source="free_by_Peter_Nerlich.jpg", long_side=320, crop=(0.15, 0.1, 0.95, 0.9)),
    "bridge.jpg": Photo(source="Bridge_by_Sander_Klootwijk.jpg", long_side=800),
    "brook.jpg": Photo(source="life_by_Aitzol_Berasategi.jpg", long_side=640, quality=75),
    "brushes.jpg": Photo(source="Picture_1A_by_freespace.jpg", long_side=640),
    "cat.png": Photo(source="chelsea.png"),
    "clock.jpg": Photo(source="greentock_by_Peter_Nerlich.jpg", long_side=720),
    "coffee.webp": Photo(source="coffee.png"),
    "dandelion.jpg": Photo(source="seeding_by_Clements_Engelhardt.jpg", long_side=900),
    "dogs.jpg": Photo(source="friends_by_Aitzol_Berasategi.jpg", long_side=720, turned=True),
    "dragonfly.jpg": Photo(source="Dragonfly_by_Bolly.jpg", long_side=640),
    "drum.jpg": Photo(source="Wine_by_Jakkub_Mede.jpg", long_side=640),
    "fig.jpg": Photo(source="Picture_0B_by_freespace.jpg", long_side=600),
    "flower.jpg": Photo(source="flower.jpg"),
    "meadow.jpg": Photo(source="aitzgorri_by_Aitzol_Berasategi.jpg", long_side=640),
    "mountains.jpg": Photo(source="picosdeeuropa_by_Aitzol_Berasategi.jpg", long_side=560),
    "nuthatch.jpg": Photo(source="Kleiber_by_Lukas_Baubkus.jpg", long_side=480, crop=(0.1875, 0.2, 0.6375, 1.0)),
    "rocket.jpg": Photo(source="rocket.jpg"),
    "sunset.jpg": Photo(source="sunset_by_Aitzol_Berasategi.jpg", long_side=900, crop=(0.0, 0.3, 1.0, 0.9)),
    "temple.jpg": Photo(source="china.jpg"),
}


def unpack(packages: Path, folder: Path) -> dict[str, Path]:
    """Unpacks the packages; returns the pictures in them by file name."""
    for path in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(path), str(folder)], check=True)
    for path in packages.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    return {path.name: path for path in sorted(folder.rglob("*")) if path.suffix in {".jpg", ".png"}}


def make(photo: Photo, source: Path, target: Path) -> None:
    """Writes a photo; the bytes of the source where nothing changes, pixels without metadata otherwise."""
    if photo == Photo(source=photo.source) and source.suffix == target.suffix:
        target.write_bytes(source.read_bytes())
        return
    with Image.open(source) as opened:
        image = opened.convert("RGB")
    if photo.crop:
        left, top, right, bottom = photo.crop
        width, height = image.size
        image = image.crop((round(left * width), round(top * height), round(right * width), round(bottom * height)))
    if photo.long_side:
        scale = photo.long_side / max(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    exif = Image.Exif()
    if photo.turned:
        image = image.transpose(Image.Transpose.ROTATE_90)
        exif[ORIENTATION] = ROTATED_BY_90
    image.info.clear()  # a colour profile would be written with the pixels
    image.save(target, quality=photo.quality, exif=exif)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "vision" / "photos")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = unpack(args.packages, Path(folder))
        missing = sorted({photo.source for photo in PHOTOS.values()} - set(found))
        if missing:
            raise SystemExit(f"{args.packages} holds no package with {', '.join(missing)}; see demo/README.md")
        for name, photo in PHOTOS.items():
            make(photo, found[photo.source], args.out / name)
    print(f"{len(PHOTOS)} photos in {args.out}")


if __name__ == "__main__":
    main()
