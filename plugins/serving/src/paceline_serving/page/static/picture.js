// Which models take a picture, and how its pixels become their input.

const FREE = 224; // of a side that may have any size
const FLOATS = ["FP16", "FP32", "FP64"];

export const RANGES = {
  "0 to 1": (value) => value / 255,
  "−1 to 1": (value) => value / 127.5 - 1,
  "0 to 255": (value) => value,
};

// (C, H, W), (H, W, C) or bytes (H, W), as `paceline predict` takes them; null where the input is something else.
export function pictureOf({ name, datatype, shape }) {
  const sizes = shape.slice(1), isFloat = FLOATS.includes(datatype);
  if (!isFloat && datatype !== "UINT8") return null;
  const first = sizes.length === 3 && [1, 3, 4].includes(sizes[0]);
  const last = sizes.length === 3 && !first && [1, 3, 4].includes(sizes[2]);
  if (!first && !last && (sizes.length !== 2 || isFloat)) return null;
  const [height, width] = (first ? sizes.slice(1) : sizes.slice(0, 2)).map((size) => (size === -1 ? FREE : size));
  if (height < 8 || width < 8) return null;
  const channels = first ? sizes[0] : last ? sizes[2] : 1;
  const full = first ? [1, channels, height, width] : last ? [1, height, width, channels] : [1, height, width];
  return { name, datatype, isFloat, height, width, channels, first, shape: full };
}

// ITU-R BT.601's luma in the 16-bit integers of Pillow's convert("L"), so that both give the same bytes.
export const grey = (r, g, b) => (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;

// From RGBA bytes, row by row, to the input's numbers in its own order.
export function tensor(picture, rgba, range) {
  const { height, width, channels, first } = picture, count = height * width;
  const data = new Array(count * channels);
  for (let i = 0; i < count; i++) {
    for (let c = 0; c < channels; c++) {
      const byte = channels === 1 ? grey(rgba[4 * i], rgba[4 * i + 1], rgba[4 * i + 2]) : rgba[4 * i + c];
      // Nine digits are any float32.
      const value = picture.isFloat ? Number(RANGES[range](byte).toPrecision(9)) : byte;
      data[first ? c * count + i : i * channels + c] = value;
    }
  }
  return { name: picture.name, datatype: picture.datatype, shape: picture.shape, data };
}

// The range of some floats that may be pixels; null if none has them.
export function rangeOf(data) {
  const [least, most] = data.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [0, 0]);
  if (least < -1 || most > 255 || (least < 0 && most > 1)) return null;
  return Object.keys(RANGES)[least < 0 ? 1 : most > 1 ? 2 : 0];
}

// The inverse of `tensor`: RGBA bytes, row by row, of a picture of the model's own size.
export function bytesOf({ height, width, channels, first }, data, range) {
  const count = height * width, bytes = new Uint8ClampedArray(4 * count).fill(255);
  const [zero, one] = range === null ? [0, 1] : [RANGES[range](0), RANGES[range](1)];
  for (let i = 0; i < count; i++) {
    for (let c = 0; c < (channels === 1 ? 3 : channels); c++) {
      const of = channels === 1 ? 0 : c;
      bytes[4 * i + c] = Math.round((data[first ? of * count + i : i * channels + of] - zero) / (one - zero));
    }
  }
  return bytes;
}
