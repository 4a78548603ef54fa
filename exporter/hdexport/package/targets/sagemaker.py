"""SageMaker: the container of `hdexport serve`, the bundle for S3, and the lines that make an endpoint of both."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget
from hdruntime.bundle.manifest import Task

_DOCKERFILE = """# docker build --tag IMAGE . makes the image.
# hdexport is the image of docker/cpu.Dockerfile, built with --build-arg EXTRAS=serve.
FROM hdexport
# SageMaker expects containers to run as root.
USER root
"""
_SCRIPT = '''"""$name on SageMaker: aws s3 sync bundle S3_URI, then python deploy.py IMAGE ROLE_ARN S3_URI."""

import json
import sys

import boto3

NAME = "$name"
INSTANCE = "ml.c7i.xlarge"


def deploy(client, image, role, uri):
    """Make an endpoint of an image in ECR and a bundle in S3, whose address ends with a slash."""
    source = {"S3Uri": uri.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    container = {
        "Image": image,
        "ModelDataSource": {"S3DataSource": source},
        # Every option of `hdexport serve` has such a variable.
        "Environment": {"HDEXPORT_MAX_SEQ_LENGTH": "$length"},
    }
    variant = {"VariantName": "all", "ModelName": NAME, "InstanceType": INSTANCE, "InitialInstanceCount": 1}
    client.create_model(ModelName=NAME, ExecutionRoleArn=role, PrimaryContainer=container)
    client.create_endpoint_config(EndpointConfigName=NAME, ProductionVariants=[variant])
    client.create_endpoint(EndpointName=NAME, EndpointConfigName=NAME)


def invoke(client, body):
    """The endpoint's answer to a body of POST /, such as {"inputs": ["a text"]}."""
    content = json.dumps(body)
    answer = client.invoke_endpoint(EndpointName=NAME, ContentType="application/json", Body=content)
    return json.load(answer["Body"])


if __name__ == "__main__":
    deploy(boto3.client("sagemaker"), *sys.argv[1:])
'''


TARGET = PackageTarget(
    name="sagemaker",
    system="Amazon SageMaker",
    source="https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html",
    tried=("boto3 1.44.8 (its checks of parameters)",),
    write=with_bundle({"Dockerfile": _DOCKERFILE, "deploy.py": _SCRIPT}),
    next_step="Push the image of FOLDER/Dockerfile to ECR, put FOLDER/bundle into S3, then: python FOLDER/deploy.py "
    "IMAGE ROLE_ARN S3_URI",
    tasks=frozenset(Task),
    takes=frozenset({"name"}),
    names=r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}",
)
