#!/usr/bin/env bash
# Install this package as a user does, not editable and into an empty environment, and use it from another folder.
# Takes a few minutes and some GB in a temporary folder, most of it for MindSpore.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"$(find_python)" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check .
cd "$folder"
export PATH="$folder/venv/bin:$PATH"
flux-db tiny-model model
flux-db demo-pictures pictures --count 3
flux-db check --pretrained_model_name_or_path model --instance_data_dir pictures \
    --instance_prompt "a photo of sks dog" --output_dir out --resolution 64 --device CPU
flux-db report --help >/dev/null
# The stored results of torch are package data, and so are the style and the script of the report.
flux-db selftest --device CPU
python - <<'PYTHON'
from importlib import resources

for package, names in {"flux_db.report": ("page.css", "page.js"), "flux_db.parity": ("reference",)}.items():
    for name in names:
        assert resources.files(package).joinpath(name).exists(), name
PYTHON
echo "The installed package works."
