"""Audits of the networks of runs: attacks, leakage, changed samples."""

from __future__ import annotations

from pipeline.cli.commands.command import Option, RunCommand, flag
from pipeline.cli.commands.parameters import (
    CommaList,
    Number,
    OneOf,
    count_option,
    out_option,
    run_argument,
)

AUDIT_COMMANDS = (
    RunCommand(
        "attack",
        "the accuracy under attacks and corruptions",
        """Attack the newest checkpoint of a run on its evaluation samples. Print the accuracy under
        each attack and signs of masked gradients, and write robustness.json into the run.""",
        [
            run_argument(text="A run on images, with checkpoints."),
            Option(
                "--norm", type=OneOf(["linf", "l2"]), default="linf", help="Norm of the change."
            ),
            Option(
                "--radius",
                type=Number(1e-6, 1000),
                metavar="R",
                help="Largest change, with pixels from 0 to 1 (default: train.adversarial.radius).",
            ),
            Option(
                "--attacks",
                type=CommaList(),
                metavar="NAME,...",
                default=(),
                show_default=False,
                help="Of noise, fgsm, pgd, apgd, square (linf only) and corruptions (default: "
                "all).",
            ),
            count_option("--steps", "Steps of pgd and apgd (default: 40 and 100).", most=100_000),
            count_option("--restarts", "Random starts of pgd and apgd (default: 1).", most=1000),
            count_option("--samples", "Evaluation samples, evenly spread (default: all)."),
        ],
        example="attack outputs/2026-11-21/14-46-29_lenet5_digits --radius 0.3",
    ),
    RunCommand(
        "leakage",
        "can the weights tell which samples they were trained on?",
        """Guess which samples a run was trained on, by their losses and by the likelihood ratio of
        shadow networks (LiRA), and write leakage.json into the run.""",
        [
            run_argument(text="A run with one class for each sample, and checkpoints."),
            count_option(
                "--shadows",
                "Shadow networks to train; 0: only the loss.",
                least=0,
                most=10_000,
                default=16,
            ),
            count_option(
                "--samples",
                "Training samples, and as many held-out samples, to guess.",
                default=1000,
            ),
        ],
        example="leakage outputs/2026-11-21/14-46-29_lenet5_digits --shadows 32",
    ),
    RunCommand(
        "fuzz",
        "changed samples and weights that cause mistakes",
        """Change evaluation samples by turns, brightness, contrast, blur and noise, guided by the
        coverage of the network's layers. Write the images with a wrong prediction.""",
        [
            run_argument(text="A run on images, with checkpoints."),
            Option(
                "--radius",
                type=Number(0, 1),
                metavar="R",
                default=0.1,
                help="Largest change of a pixel, except by turns, with pixels from 0 to 1.",
            ),
            count_option("--samples", "Evaluation samples to change, evenly spread.", default=200),
            count_option("--mutants", "Changed samples to try.", default=10_000),
            flag(
                "--faults",
                "with_faults",
                text="Also flip bits, zero weights and change signs; write faults.csv.",
            ),
            out_option("FOLDER", "Folder (default: RUN_DIR/fuzz)."),
        ],
        example="fuzz outputs/2026-11-21/14-46-29_lenet5_digits --radius 0.2 --faults",
    ),
)
