"""The one configuration of every verb: all sections, of which a verb reads its own."""

from dataclasses import dataclass, field
from pathlib import Path

from robopolicy.configuration.algorithms import AlgorithmsSection
from robopolicy.configuration.bakeoff import BakeoffSection
from robopolicy.configuration.bench import BenchSection
from robopolicy.configuration.check import CheckSection
from robopolicy.configuration.collect import CollectSection
from robopolicy.configuration.demo import DemoSection
from robopolicy.configuration.deploy import DeploySection
from robopolicy.configuration.distill import DistillSection
from robopolicy.configuration.doctor import DoctorSection
from robopolicy.configuration.drive import DriveSection
from robopolicy.configuration.evaluate import EvaluateSection
from robopolicy.configuration.finetune import FinetuneSection
from robopolicy.configuration.gate import GateSection
from robopolicy.configuration.imagine import ImagineSection
from robopolicy.configuration.inference import InferenceSection
from robopolicy.configuration.offline import OfflineSection
from robopolicy.configuration.online import OnlineSection
from robopolicy.configuration.optimize import OptimizeSection
from robopolicy.configuration.pipeline import PipelineSection
from robopolicy.configuration.plan import PlanSection
from robopolicy.configuration.policy import PolicySection
from robopolicy.configuration.rank import RankSection
from robopolicy.configuration.report import ReportSection
from robopolicy.configuration.run import RunSection
from robopolicy.configuration.serve import ServeSection
from robopolicy.configuration.teach import TeachSection
from robopolicy.configuration.train import TrainSection
from robopolicy.configuration.world import WorldSection
from robopolicy.configuration.worldmodel import WorldModelSection
from robopolicy.policies.lerobot_configuration import LeRobotTuning


@dataclass(frozen=True)
class Config:
    """Every section; a verb reads its own."""

    run: RunSection = field(default_factory=RunSection)
    world: WorldSection = field(default_factory=WorldSection)
    collect: CollectSection = field(default_factory=CollectSection)
    policy: PolicySection = field(default_factory=PolicySection)
    train: TrainSection = field(default_factory=TrainSection)
    finetune: FinetuneSection = field(default_factory=FinetuneSection)
    lerobot: LeRobotTuning = field(default_factory=LeRobotTuning)
    worldmodel: WorldModelSection = field(default_factory=WorldModelSection)
    imagine: ImagineSection = field(default_factory=ImagineSection)
    plan: PlanSection = field(default_factory=PlanSection)
    offline: OfflineSection = field(default_factory=OfflineSection)
    online: OnlineSection = field(default_factory=OnlineSection)
    gate: GateSection = field(default_factory=GateSection)
    bakeoff: BakeoffSection = field(default_factory=BakeoffSection)
    deploy: DeploySection = field(default_factory=DeploySection)
    teach: TeachSection = field(default_factory=TeachSection)
    distill: DistillSection = field(default_factory=DistillSection)
    optimize: OptimizeSection = field(default_factory=OptimizeSection)
    inference: InferenceSection = field(default_factory=InferenceSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    rank: RankSection = field(default_factory=RankSection)
    serve: ServeSection = field(default_factory=ServeSection)
    drive: DriveSection = field(default_factory=DriveSection)
    doctor: DoctorSection = field(default_factory=DoctorSection)
    bench: BenchSection = field(default_factory=BenchSection)
    algorithms: AlgorithmsSection = field(default_factory=AlgorithmsSection)
    report: ReportSection = field(default_factory=ReportSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    demo: DemoSection = field(default_factory=DemoSection)
    check: CheckSection = field(default_factory=CheckSection)
    json: Path | None = None
