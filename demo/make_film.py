"""Makes demo/vision/sunset.mp4: 2.4 seconds in which a window of 256x192 pixels goes over a demo photo, left to right.

python demo/make_film.py    (needs PyAV, extra `video`; the same PyAV and Pillow give the same bytes)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import av
from PIL import Image

VISION = Path(__file__).resolve().parent / "vision"
NUM_FRAMES, FPS, WIDTH, HEIGHT = 24, 10, 256, 192


def make_film(path: Path) -> None:
    """Writes the film: H.264 of one thread, so that its bytes are the same on any machine."""
    with Image.open(VISION / "photos" / "sunset.jpg") as opened:
        photo = opened.convert("RGB").resize((opened.width * HEIGHT // opened.height, HEIGHT), Image.Resampling.LANCZOS)
    with av.open(str(path), "w") as film:
        options = {"crf": "30", "preset": "slow", "threads": "1"}
        stream: Any = film.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(NUM_FRAMES):
            left = (photo.width - WIDTH) * number // (NUM_FRAMES - 1)
            film.mux(stream.encode(av.VideoFrame.from_image(photo.crop((left, 0, left + WIDTH, HEIGHT)))))
        film.mux(stream.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=VISION / "sunset.mp4")
    args = parser.parse_args()
    make_film(args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
