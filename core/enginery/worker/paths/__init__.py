"""The ways to run a step: `Paths` has one for each, and `Runner._path_of` picks it. Nothing here inherits from another.

    EagerPath         any step, kernel by kernel
    MixedGraphs       prefills and mixed steps, captured whole or between calls of attention
    DecodeGraphs      decoding steps as CUDA graphs ┐ each says which steps are captured, and when;
    RecordedSteps     decoding steps on a CPU       ┘ one `DecodeCapture` captures and replays them

`DecodeCapture` is given what differs: what records (`CudaCapture`, `HostCapture`), and what is made of the hidden states behind the
model (`LogitsHead`, `RecordedHead`, of several ranks `ColumnsHead`, or nothing). As classes over each other these two would cross.
What ranks do behind a step is a path over another one (`worker.ranks.path`).
"""
