"""Factors of the physics: size, mass and friction of objects, as multiples of the scene's own.

Objects are the bodies that move without an actuator: cubes, blocks, trays, drawers. Policies and experts do not observe
these values.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import mujoco
import numpy as np

from sims.variations.protocol import Factor

NO_OBJECT = "no body of its scene moves without an actuator"


def objects(model: mujoco.MjModel) -> np.ndarray:
    """Return a mask [nbody] bool of the bodies in kinematic trees that no actuator drives."""
    driven_bodies: set[int] = set()
    for kind, target in zip(model.actuator_trntype, model.actuator_trnid[:, 0], strict=True):
        if kind in (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT):
            driven_bodies.add(int(model.jnt_bodyid[target]))
        elif kind == mujoco.mjtTrn.mjTRN_TENDON:
            begin = model.tendon_adr[target]
            wraps = slice(begin, begin + model.tendon_num[target])
            is_joint = model.wrap_type[wraps] == mujoco.mjtWrap.mjWRAP_JOINT
            driven_bodies |= {int(model.jnt_bodyid[joint]) for joint in model.wrap_objid[wraps][is_joint]}
        elif kind == mujoco.mjtTrn.mjTRN_BODY:
            driven_bodies.add(int(target))
        else:
            driven_bodies.add(int(model.site_bodyid[target]))
    trees = model.body_treeid
    driven_trees = {int(trees[body]) for body in driven_bodies}
    return np.array([tree >= 0 and int(tree) not in driven_trees for tree in trees])


class _OfObjects(Factor):
    """A physical factor of a scene's objects."""

    physical = True

    def __init__(self, model: mujoco.MjModel):
        super().__init__(model)
        self._bodies = objects(model)

    @classmethod
    def obstacle(cls, model: mujoco.MjModel) -> str:
        """Implement `Factor.obstacle`."""
        return "" if objects(model).any() else NO_OBJECT


class Mass(_OfObjects):
    """Mass and inertia of objects."""

    visible = False
    low, high = 0.05, 20.0
    swept = (0.5, 2.0)

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`."""
        model.body_mass[self._bodies] *= value
        model.body_inertia[self._bodies] *= value


class Friction(_OfObjects):
    """Sliding friction of all contacts, and damping and friction of the objects' joints, such as a planar table's."""

    visible = False
    low, high = 0.05, 20.0
    swept = (0.5, 2.0)

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`."""
        model.geom_friction[:, 0] *= value
        model.pair_friction[:, :2] *= value
        slides = self._bodies[model.dof_bodyid]
        model.dof_damping[slides] *= value
        model.dof_frictionloss[slides] *= value


class Size(_OfObjects):
    """Edges of objects at unchanged mass: of those that move freely, or of all if none does.

    What moves freely starts higher by as much as its lower half has grown, so that it stands where it stood.
    """

    low, high = 0.5, 2.0
    swept = (0.8, 1.25)

    def __init__(self, model: mujoco.MjModel):
        super().__init__(model)
        self._bodies = _sized(model)
        self._drops = _drops(model, self._bodies)

    @classmethod
    def obstacle(cls, model: mujoco.MjModel) -> str:
        """Implement `Factor.obstacle`."""
        sized = _sized(model)
        shapes = (mujoco.mjtGeom.mjGEOM_MESH, mujoco.mjtGeom.mjGEOM_HFIELD, mujoco.mjtGeom.mjGEOM_SDF)
        if np.isin(model.geom_type[sized[model.geom_bodyid]], [shape.value for shape in shapes]).any():
            return "an object is a mesh, which only its file can scale"
        return super().obstacle(model)

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`: lengths grow by `value`, inertia at equal mass by its square."""
        bodies = self._bodies
        inner = bodies & bodies[model.body_parentid]
        geoms, sites, joints = (bodies[ids] for ids in (model.geom_bodyid, model.site_bodyid, model.jnt_bodyid))
        for array, mask in (
            (model.geom_size, geoms),
            (model.geom_pos, geoms),
            (model.geom_rbound, geoms),
            (model.geom_aabb, geoms),
            (model.site_size, sites),
            (model.site_pos, sites),
            (model.jnt_pos, joints),
            (model.body_pos, inner),
            (model.body_ipos, bodies),
        ):
            array[mask] *= value
        model.body_inertia[bodies] *= value**2
        for body in np.flatnonzero(bodies):
            begin = model.body_bvhadr[body]
            if begin >= 0:
                model.bvh_aabb[begin : begin + model.body_bvhnum[body]] *= value

    def place(self, qpos: np.ndarray, values: np.ndarray) -> None:
        """Implement `Factor.place`: qpos [R, nq], values [R]."""
        for address, drop in self._drops.items():
            qpos[:, address] += (values - 1) * drop


def _sized(model: mujoco.MjModel) -> np.ndarray:
    """Return a mask [nbody] bool of the objects that `Size` scales."""
    bodies = objects(model)
    free_trees = model.body_treeid[model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]]
    free = bodies & np.isin(model.body_treeid, free_trees)
    return free if free.any() else bodies


def _drops(model: mujoco.MjModel, bodies: np.ndarray) -> dict[int, float]:
    """Return the distance in m from the origin of each free object down to its lowest point of contact, as it stands in
    the model, by the place of its height in qpos.
    """
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    rotations = data.geom_xmat.reshape(-1, 3, 3)
    centres = data.geom_xpos + np.einsum("gij,gj->gi", rotations, model.geom_aabb[:, :3])
    lowest = centres[:, 2] - np.einsum("gj,gj->g", np.abs(rotations[:, 2]), model.geom_aabb[:, 3:])
    touches = (model.geom_contype | model.geom_conaffinity) != 0
    drops: dict[int, float] = {}
    for joint in np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE):
        body = model.jnt_bodyid[joint]
        geoms = touches & (model.body_treeid[model.geom_bodyid] == model.body_treeid[body])
        if bodies[body] and geoms.any():
            drops[int(model.jnt_qposadr[joint]) + 2] = float(data.xpos[body, 2] - lowest[geoms].min())
    return drops
