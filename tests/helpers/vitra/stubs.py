"""Stand in for the packages that VITRA imports and that are not installed here; one row each in `STUBS`."""

from __future__ import annotations

import sys
import types

import numpy as np

STUBS = {
    "utils3d": "installed from a Git repository, not from PyPI; the nine functions of geometry that its augmentation "
    "calls",
}
"""The packages, and what of them is used."""


def install():
    """Answer ``import utils3d``."""
    module, arrays = types.ModuleType("utils3d"), types.ModuleType("utils3d.numpy")
    for function in (
        fov_to_focal, focal_to_fov, intrinsics_to_fov, intrinsics_from_focal_center, image_uv, uv_to_pixel,
        unproject_cv, rotation_matrix_from_vectors, ray_intersection,
    ):  # fmt: skip
        setattr(module, function.__name__, function)
        setattr(arrays, function.__name__, function)
    module.numpy = arrays
    sys.modules |= {"utils3d": module, "utils3d.numpy": arrays}


def fov_to_focal(fov):
    """Return the focal length, as a fraction of the image, of an angle of view in radians."""
    return 0.5 / np.tan(fov / 2)


def focal_to_fov(focal):
    return 2 * np.arctan(0.5 / focal)


def intrinsics_to_fov(intrinsics):
    return focal_to_fov(intrinsics[..., 0, 0]), focal_to_fov(intrinsics[..., 1, 1])


def intrinsics_from_focal_center(fx, fy, cx, cy):
    return np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])


def image_uv(width, height):
    """Return the centres of an image's pixels, as fractions of the image: height x width x 2."""
    u, v = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    return np.stack(np.meshgrid(u, v), axis=-1).astype(np.float32)


def uv_to_pixel(uv, width, height):
    return uv * np.array([width, height]) - 0.5


def unproject_cv(uv, depth, intrinsics):
    """Return the points in the camera's coordinates (x right, y down, z forward)."""
    rays = np.concatenate([uv, np.ones_like(uv[..., :1])], axis=-1) @ np.linalg.inv(intrinsics).T
    return rays * depth[..., None]


def rotation_matrix_from_vectors(source, target):
    """Return the rotation about the vectors' common normal that turns one direction into the other."""
    source, target = source / np.linalg.norm(source), target / np.linalg.norm(target)
    x, y, z = np.cross(source, target)
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return (np.eye(3) + skew + skew @ skew / (1 + source @ target)).astype(np.float32)


def ray_intersection(start, direction, other_start, other_direction):
    """Return where lines in the plane intersect, and the lengths along both."""
    direction, other = np.broadcast_arrays(direction, np.asarray(other_direction, dtype=np.float64))
    matrix = np.stack([direction, -other], axis=-1)
    lengths = np.linalg.solve(matrix, np.broadcast_to(other_start - start, direction.shape)[..., None])[..., 0]
    return start + lengths[..., :1] * direction, lengths
