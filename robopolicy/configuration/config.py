"""The configuration of all verbs: all sections, of which each verb reads its own."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from robopolicy.configuration.sections.act import (
    DeploySection,
    EvaluateSection,
    ExportSection,
    InferenceSection,
    OptimizeSection,
)
from robopolicy.configuration.sections.detect import DetectSection
from robopolicy.configuration.sections.learn import (
    DistillSection,
    FinetuneSection,
    OnlineSection,
    PolicySection,
    TeachSection,
    TrainSection,
)
from robopolicy.configuration.sections.recorded import (
    BakeoffSection,
    CollectSection,
    ConvertSection,
    DoctorSection,
    GateSection,
    OfflineSection,
)
from robopolicy.configuration.sections.run import RunSection, WorkersSection, WorldSection
from robopolicy.configuration.sections.serve import DriveSection, ServeSection
from robopolicy.configuration.sections.success import SuccessSection
from robopolicy.configuration.sections.tools import (
    AlgorithmsSection,
    AnalyzeSection,
    BenchSection,
    CheckSection,
    DemoSection,
    ImprovementSection,
    PipelineSection,
    PushSection,
    ReportSection,
    RouteSection,
    SweepSection,
    WatchSection,
)
from robopolicy.configuration.sections.worldmodel import ImagineSection, PlanSection, RankSection, WorldModelSection
from robopolicy.policies.lerobot.configuration import LeRobotTuning


@dataclass(frozen=True, init=False)
class Config:
    """All sections; a verb reads its own. A section that is not given has its defaults and is built on first access."""

    run: RunSection = field(default_factory=RunSection)
    world: WorldSection = field(default_factory=WorldSection)
    workers: WorkersSection = field(default_factory=WorkersSection)
    collect: CollectSection = field(default_factory=CollectSection)
    convert: ConvertSection = field(default_factory=ConvertSection)
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
    export: ExportSection = field(default_factory=ExportSection)
    inference: InferenceSection = field(default_factory=InferenceSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    success: SuccessSection = field(default_factory=SuccessSection)
    detect: DetectSection = field(default_factory=DetectSection)
    analyze: AnalyzeSection = field(default_factory=AnalyzeSection)
    rank: RankSection = field(default_factory=RankSection)
    route: RouteSection = field(default_factory=RouteSection)
    serve: ServeSection = field(default_factory=ServeSection)
    drive: DriveSection = field(default_factory=DriveSection)
    doctor: DoctorSection = field(default_factory=DoctorSection)
    bench: BenchSection = field(default_factory=BenchSection)
    algorithms: AlgorithmsSection = field(default_factory=AlgorithmsSection)
    report: ReportSection = field(default_factory=ReportSection)
    watch: WatchSection = field(default_factory=WatchSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    demo: DemoSection = field(default_factory=DemoSection)
    improve: ImprovementSection = field(default_factory=ImprovementSection)
    check: CheckSection = field(default_factory=CheckSection)
    push: PushSection = field(default_factory=PushSection)
    sweep: SweepSection = field(default_factory=SweepSection)
    json: Path | None = None

    def __init__(self, **sections: Any):
        if unknown_names := sections.keys() - {item.name for item in fields(Config)}:
            raise TypeError(f"There are no sections {sorted(unknown_names)}.")
        vars(self).update(sections)

    def __getattr__(self, name: str) -> Any:
        """Return the section `name`, which was not given, with its defaults; AttributeError if there is no such
        section.
        """
        item = next((item for item in fields(Config) if item.name == name), None)
        if item is None or item.default_factory is MISSING:
            raise AttributeError(f"There is no section '{name}'.")
        return vars(self).setdefault(name, item.default_factory())

    def replaced(self, **sections: Any) -> "Config":
        """Return a copy with some sections replaced."""
        return Config(**{**vars(self), **sections})
