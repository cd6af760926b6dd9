"""All seeded faults."""

from faults_meshes import FAULTS as MESHES
from faults_models import FAULTS as MODELS
from faults_operations import FAULTS as OPERATIONS
from faults_training import FAULTS as TRAINING

FAULTS = [*OPERATIONS, *MESHES, *TRAINING, *MODELS]
